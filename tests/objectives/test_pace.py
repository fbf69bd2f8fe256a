"""A learning rate that follows the KL of its steps: laws on a policy whose KL is known in closed form."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import some
from sage_grpo.training.optim import GAIN, LARGEST_STEP, LEAST, SLACK, TRIES, AdaptiveRate, share_kept


def kl_of_step(rate: float, *, gradient: float = 3.0, sensitivity: float = 2.0) -> float:
    """A Gaussian policy whose velocity is a weight: KL = 1/2 sensitivity^2 (rate gradient)^2."""
    return 0.5 * (sensitivity * rate * gradient) ** 2


@pytest.mark.parametrize("rate", [0.03, 1.0])
def test_it_settles_at_the_target_from_any_learning_rate_above(rate: float) -> None:
    pace = AdaptiveRate(0.01)
    for _ in range(80):
        pace.observe(kl_of_step(rate * pace.factor))
    assert kl_of_step(rate * pace.factor) == pytest.approx(0.01, rel=1e-3)


def test_one_observation_corrects_its_part_of_the_deviation_of_the_step() -> None:
    """Not of the KL, which is the step's square."""
    pace = AdaptiveRate(0.01)
    target = math.sqrt(2 * 0.01) / 6  # the rate whose step has this KL
    rate = 1.3 * target
    pace.observe(kl_of_step(rate))
    assert math.log(rate * pace.factor / target) == pytest.approx((1 - GAIN) * math.log(1.3))


def test_it_is_never_hotter_than_asked_and_recovers_after_a_spike() -> None:
    pace = AdaptiveRate(0.01)
    assert {pace.observe(1e-6) for _ in range(5)} == {1.0}
    assert pace.observe(1e9) == pytest.approx(1 / LARGEST_STEP)
    for _ in range(50):
        pace.observe(1e-3)
    assert pace.factor == 1.0
    for _ in range(100):
        pace.observe(1e9)
    assert pace.factor == LEAST


def test_without_a_target_and_without_a_move_nothing_follows() -> None:
    assert AdaptiveRate(None).observe(1e9) == 1.0
    pace = AdaptiveRate(0.01)
    pace.observe(0.02)
    before = pace.factor
    assert before < 1.0
    assert pace.observe(0.0) == before  # no gradient, no information


@some
@given(kls=st.lists(st.floats(0.0, 1e3), max_size=40), cut=st.integers(0, 40))
def test_a_resumed_pace_continues(kls: list[float], cut: int) -> None:
    straight, first, second = (AdaptiveRate(0.1) for _ in range(3))
    expected = [straight.observe(kl) for kl in kls]
    found = [first.observe(kl) for kl in kls[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [second.observe(kl) for kl in kls[cut:]] == expected
    assert all(LEAST <= factor <= 1 for factor in expected)


def test_what_is_no_kl_is_refused() -> None:
    for kl in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="cannot steer the learning rate"):
            AdaptiveRate(0.1).observe(kl)


SHAPES = {
    "square": (lambda share: 5 * share**2, 1),
    "linear": (lambda share: 10 * share, 2),
    "sixth power": (lambda share: 50 * share**6, 2),
    "exponential": (lambda share: math.expm1(10 * share), 5),
    "saturates": (lambda share: 4 * (1 - math.exp(-300 * share**2)), 6),
    "flat, then steep": (lambda share: 2 * share**2 / (1 + 50 * share**2) + 9 * share**12, 10),
    "jumps late": (lambda share: 10 / (1 + math.exp(20 - 40 * share)) - 10 / (1 + math.exp(20)), 7),
    "up and down": (lambda share: 30 * share**2 * (1.5 + math.sin(25 * share)), 5),
}
"""KL by the share of a step, from 0, and tries that it takes at most."""


@pytest.mark.parametrize("most", [1e-6, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_kept_of_a_step_has_the_largest_kl(shape: str, most: float) -> None:
    """However the KL goes with the share; the share that is returned is the last one that was measured."""
    (kl, most_tries), tried = SHAPES[shape], []
    assert kl(1.0) > most
    kept = share_kept(kl(1.0), most, lambda share: (tried.append(share), kl(share))[1])
    assert kl(kept) == pytest.approx(most, rel=SLACK)
    assert kept == tried[-1] < 1.0
    assert len(tried) <= most_tries


def test_shares_are_tried_on_the_line_through_the_last_two_and_every_fourth_time_half_way() -> None:
    """In logarithms. Where rounding alone has a larger KL nothing is kept."""
    tried: list[float] = []
    assert share_kept(9.0, 0.05, lambda share: (tried.append(share), 0.06 + share**2)[1]) == 0.0
    first = [0.0745356, 0.0646111, 0.0392212, 0.0196106, 0.0134456, 0.00928118, 0.0064268, 0.0032134]
    assert tried == pytest.approx([*first, 0.00223076, 0.00154888, 0.00107553, 0.000537763], rel=1e-4)
    assert len(tried) == TRIES
    tried.clear()
    kl = SHAPES["jumps late"][0]
    share_kept(kl(1.0), 0.5, lambda share: (tried.append(share), kl(share))[1])
    assert tried == pytest.approx([0.223607, 0.666399, 0.495759, 0.332949, 0.426978, 0.426338], rel=1e-4)


def test_a_step_within_the_slack_is_kept_without_a_try() -> None:
    assert share_kept(51.0, 50.0, lambda share: pytest.fail("measured")) == 1.0
    assert share_kept(51.5, 50.0, lambda share: 51.5 * share**2) < 1.0


def test_a_brake_holds_however_little_the_policy_moves() -> None:
    """A KL far below the target asks for longer steps: they become as long as the brake allows, and no longer."""
    pace = AdaptiveRate(0.01)
    for brake in (0.5, 0.25):
        pace.slow_to(brake)
        assert {pace.observe(1e-9) for _ in range(40)} == {brake}
    still = AdaptiveRate(None)
    still.slow_to(0.25)
    assert [still.observe(1e-9) for _ in range(3)] == [0.25] * 3
    for _ in range(100):
        pace.observe(1e9)
    assert pace.factor == LEAST * 0.25


def test_brakes_are_shares_of_the_free_step_and_not_of_one_another() -> None:
    pace = AdaptiveRate(0.01)
    for brake in (0.5, 0.25, 0.25, 1.0, 0.125):
        pace.slow_to(brake)
        assert pace.factor == brake
    again = AdaptiveRate(0.01)
    again.load_state_dict(json.loads(json.dumps(pace.state_dict())))
    again.slow_to(0.125)  # as after going back: it is what it was
    assert again.factor == 0.125


def test_a_target_follows_the_square_of_the_brake() -> None:
    """Steps half as long move the policy by a quarter: that is no reason to lengthen them again."""
    pace = AdaptiveRate(0.04)
    pace.slow_to(0.5)
    assert pace.observe(0.01) == pytest.approx(0.5, rel=1e-12)
