"""The inspector's numbers are the oracles' numbers; its warnings come when they should, and only then."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import final_variance as recursion
from sage_grpo.samplers.kernels import Cps, Dance, Flow, Kernel, Ode, Sage, SageExact
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.inspect import final_variance, inspect_kernel, variances, warnings


def _schedule(steps: int, shift: float, *, last: bool = False) -> Schedule:
    schedule = Schedule.shifted(steps, shift)
    return schedule.exploring(schedule.stochastic, deterministic_last=last)


def _warned(kernel: Kernel, schedule: Schedule, words: str) -> bool:
    return any(words in text for text in warnings(kernel, schedule))


@pytest.mark.parametrize(
    ("kernel", "steps", "shift", "off", "on"),
    [
        (Flow(), 10, 5.0, 0.0558, None),
        (Dance(), 320, 5.0, 0.837, None),
        (Ode(), 20, 1.0, 0.0, 0.879),
        (Flow(), 160, 1.0, None, 1.003),
        (Cps(), 320, 1.0, 0.0, 0.844),
        (SageExact(), 80, 1.0, 0.0, 0.965),
    ],
)
def test_residual_variances_are_the_oracles(
    kernel: Kernel, steps: int, shift: float, off: float | None, on: float | None
) -> None:
    report = inspect_kernel(kernel, _schedule(steps, shift))
    if off is not None:
        assert report.off_manifold_variance == pytest.approx(off, abs=1e-3 if off > 0.1 else 6e-5)
        assert off != 0 or report.off_manifold_variance == 0
    if on is not None:
        assert report.on_manifold_variance == pytest.approx(on, abs=1e-3)


def test_totals_shares_and_weights() -> None:
    report = inspect_kernel(Sage(), _schedule(20, 5.0))
    assert report.total_variance == pytest.approx(4.812 * 0.25, rel=1e-4)
    assert sum(row.share for row in report.rows) == pytest.approx(1.0)
    assert report.sensitivity_span == pytest.approx(148, abs=1)
    products = [row.sensitivity * row.weight for row in report.rows]  # type: ignore[operator]
    assert max(products) == pytest.approx(min(products), rel=1e-5)
    assert inspect_kernel(Dance(eta=0.7), _schedule(13, 3.0)).total_variance == pytest.approx(0.49)


def test_the_recursion_agrees_with_the_tests_own_and_starts_anywhere() -> None:
    schedule = _schedule(17, 3.0)
    for kernel in (Flow(), Sage(), SageExact(eta=1.2), Cps(eta=0.9), Dance()):
        for c in (0.0, 0.3, 1.0):
            assert final_variance(kernel, schedule, c) == pytest.approx(recursion(kernel, schedule.sigmas, c))
    part = Schedule(torch.tensor([0.6, 0.3, 0.1]))
    assert variances(SageExact(), part, 0.0) == pytest.approx([0.09, 0.01])


def test_a_schedule_that_starts_inside_the_clamp_is_named() -> None:
    schedule = _schedule(38, 9.0, last=True)
    assert _warned(Sage(), schedule, "swallows step 0")
    assert not _warned(SageExact(), schedule, "swallows")
    assert not _warned(Sage(sigma_max=0.9999), schedule, "swallows")
    assert inspect_kernel(Sage(), schedule).rows[0].sensitivity is None


def test_noise_left_in_the_video_is_named_and_the_remedy_works() -> None:
    for kernel in (Flow(), Dance(), Sage()):
        assert _warned(kernel, _schedule(20, 5.0), "stays in the video")
        assert not _warned(kernel, _schedule(20, 5.0, last=True), "stays in the video")
        assert inspect_kernel(kernel, _schedule(20, 5.0, last=True)).off_manifold_variance == 0
    for kernel in (Cps(), SageExact()):
        assert not _warned(kernel, _schedule(20, 5.0), "stays in the video")


def test_other_dangers_are_named() -> None:
    assert _warned(Cps(), _schedule(20, 5.0), "does not converge")
    assert not _warned(SageExact(eta=2.0), _schedule(4, 12.0), "does not converge")
    assert _warned(Sage(), _schedule(20, 5.0), "span 148x")
    assert _warned(Sage(eta=1.0), _schedule(10, 1.0), "a of x is negative at step 0")
    assert _warned(Sage(eta=1.0), _schedule(10, 1.0), "Step 0 injects 71% of all variance")
    assert _warned(Sage(eta=1.0), _schedule(10, 1.0), "1.18 times the variance of the data")
    assert _warned(Sage(eta=0.0), _schedule(10, 1.0), "nothing to train")


def test_a_harmless_choice_gives_no_warning() -> None:
    assert warnings(Ode(), _schedule(20, 5.0)) == []
    assert warnings(Sage(eta=0.5), _schedule(20, 5.0, last=True)) == []
    # Its first step renews all of the noise, which is told.
    later = Schedule.shifted(10, 3.0).exploring([False] + [True] * 9)
    assert warnings(SageExact(eta=0.5), later) == []
