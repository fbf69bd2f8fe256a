"""The KL coefficient: ramp, feedback, clamps, and resume = continue."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import some
from sage_grpo.training.kl_coefficient import SHARE_GAIN, SHARE_STEP, KlCoefficient, KlController

KINDS = ("constant", "two_stage", "paper", "ppo", "share")


def test_the_ramp_is_linear_in_optimizer_updates() -> None:
    controller = KlController(KlCoefficient())
    assert controller.value == 1e-7
    values = [controller.observe(0.0) for _ in range(150)]
    assert values == pytest.approx([1e-7 + (1e-5 - 1e-7) * min(k / 100, 1.0) for k in range(1, 151)], rel=1e-12)


def test_constant_is_constant_and_no_warm_up_starts_at_the_top() -> None:
    controller = KlController(KlCoefficient(kind="constant", lambda_max=3e-4))
    assert {controller.value, *(controller.observe(kl) for kl in (0.0, 1.0, 9.0))} == {3e-4}
    assert KlController(KlCoefficient(warmup_updates=0)).value == 1e-5


@pytest.mark.parametrize(
    ("kl", "ppo", "paper"), [(1.6, 1.1, 0.9), (1.5, 1, 1), (0.75, 1, 1), (0.5, 1, 1), (0.4, 0.9, 1.1)]
)
def test_one_update_of_the_feedback(kl: float, ppo: float, paper: float) -> None:
    """It rests from half of the target to one and a half; both ends are part of it. The paper's goes the other way."""
    for kind, factor in (("ppo", ppo), ("paper", paper)):
        for start, limit in ((0.125, 1.0), (1.0, 1.0), (0.0625, 0.0625)):
            config = {"lambda_min": 0.0625, "lambda_max": limit, "warmup_updates": 0, "target": 2.0, "window": 1}
            controller = KlController(KlCoefficient(kind=kind, **config))  # type: ignore[arg-type]
            controller.value = start
            assert controller.observe(2 * kl) == pytest.approx(min(max(start * factor, 0.0625), limit))


def test_feedback_waits_for_the_end_of_the_ramp_and_averages_its_window() -> None:
    config = KlCoefficient(kind="ppo", lambda_min=0.01, lambda_max=1.0, warmup_updates=4, target=1.0, window=3)
    controller = KlController(config)
    for _ in range(4):
        controller.observe(0.0)
    assert controller.value == 1.0
    # means of (0, 0, 0), (0, 0, 3), which holds, and (0, 3, 3)
    assert [controller.observe(kl) for kl in (0.0, 3.0, 3.0)] == pytest.approx([0.9, 0.9, 0.99])
    assert controller.history == [0.0, 3.0, 3.0]


@some
@given(
    kind=st.sampled_from(KINDS),
    kls=st.lists(st.floats(0.0, 10.0), max_size=30),
    cut=st.integers(0, 30),
    warmup=st.integers(0, 20),
)
def test_a_resumed_controller_continues_and_never_leaves_its_bounds(
    kind: str, kls: list[float], cut: int, warmup: int
) -> None:
    limits = {"lambda_min": 0.1, "lambda_max": 1.0, "lambda_cap": 1.0}
    config = KlCoefficient(kind=kind, warmup_updates=warmup, target=1.0, window=4, **limits)  # type: ignore[arg-type]
    straight, first, resumed = (KlController(config) for _ in range(3))
    expected = [straight.observe(kl, kl / 10) for kl in kls]
    found = [first.observe(kl, kl / 10) for kl in kls[:cut]]
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [resumed.observe(kl, kl / 10) for kl in kls[cut:]] == expected
    assert resumed.state_dict() == straight.state_dict()
    assert all(0.1 <= value <= 1.0 for value in expected)


def share_of(value: float, weight: float) -> float:
    """The KL's gradient is `weight` times lambda where the policy's is 1."""
    return value * weight / (1 + value * weight)


@pytest.mark.parametrize(("share", "weight"), [(0.02, 100.0), (0.9, 1e-3)])
def test_the_share_settles_at_its_target_whatever_the_kl_weighs(share: float, weight: float) -> None:
    controller = KlController(KlCoefficient(kind="share", share=share, lambda_min=1e-9, lambda_cap=1e9))
    for _ in range(150):
        controller.observe(0.0, share_of(controller.value, weight))
    assert share_of(controller.value, weight) == pytest.approx(share, rel=1e-3)


def test_one_update_corrects_its_part_of_the_deviation_of_lambda() -> None:
    controller = KlController(KlCoefficient(kind="share", share=0.5))
    assert controller.observe(0.0, share_of(1.0, 0.7)) == pytest.approx(0.7**-SHARE_GAIN)  # 1 / 0.7 would be right
    # the policy had no gradient at all
    assert controller.observe(0.0, 1.0) == pytest.approx(0.7**-SHARE_GAIN / SHARE_STEP)


def test_a_share_of_zero_says_nothing_and_a_tiny_one_ends_at_the_cap() -> None:
    """The first update from a fixed anchor, and those after renewals: lambda must not run away."""
    controller = KlController(KlCoefficient(kind="share", lambda_cap=30.0))
    assert {controller.value, controller.observe(0.0, 0.0), controller.observe(0.1)} == {1.0}
    assert controller.observe(1e-9, 1e-12) == SHARE_STEP
    for _ in range(100):
        controller.observe(1e-9, 1e-12)
    assert controller.value == 30.0
    for _ in range(100):
        controller.observe(1e-9, 1.0)
    assert controller.value == controller.config.lambda_min


def test_bounds_that_cross_are_refused() -> None:
    for kind, name in (("ppo", "lambda_max"), ("share", "lambda_cap")):
        with pytest.raises(ValueError, match=f"lambda_min must be at most kl.{name}"):
            KlCoefficient(**{"kind": kind, "lambda_min": 1.0, name: 0.1})
    assert KlController(KlCoefficient(lambda_min=1e-5, lambda_max=1e-5)).value == 1e-5  # bounds may be equal


def test_a_broken_kl_stops_instead_of_poisoning_the_history() -> None:
    controller = KlController(KlCoefficient())
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="The KL of update 0 is"):
            controller.observe(kl)
    assert controller.history == []
