"""Schedules: shifts, strictness, and which steps explore."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import grid, law
from sage_grpo.flow.schedule import Schedule, shift_sigmas


@law
@given(steps=st.integers(1, 1000), shift=st.floats(0.1, 20.0))
def test_a_shifted_schedule_goes_strictly_from_one_to_zero(steps: int, shift: float) -> None:
    schedule = Schedule.shifted(steps, shift)
    assert schedule.num_steps == steps
    assert schedule.sigmas.dtype == torch.float32
    assert float(schedule.sigmas[0]) == 1.0
    assert float(schedule.sigmas[-1]) == 0.0
    assert (schedule.sigmas.diff() < 0).all()
    torch.testing.assert_close(schedule.sigmas, grid(steps, shift).float(), rtol=1e-6, atol=1e-7)


@law
@given(first=st.floats(0.1, 10.0), second=st.floats(0.1, 10.0))
def test_shifts_multiply_in_the_odds(first: float, second: float) -> None:
    even = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    torch.testing.assert_close(shift_sigmas(shift_sigmas(even, first), second), shift_sigmas(even, first * second))
    torch.testing.assert_close(torch.logit(shift_sigmas(even, first)), torch.logit(even) + math.log(first))


def test_pair_and_pairs_agree() -> None:
    schedule = Schedule.shifted(5, 3.0)
    p, q = schedule.pairs()
    for index in range(5):
        assert schedule.pair(index) == (p[index], q[index])
    for index in (-1, 5):
        with pytest.raises(IndexError, match="steps 0 to 4"):
            schedule.pair(index)


def test_the_last_step_is_made_deterministic_only_if_it_ends_in_data() -> None:
    schedule = Schedule.shifted(4)
    assert schedule.stochastic == (True,) * 4
    explored = schedule.exploring((True, False, True, True), deterministic_last=True)
    assert explored.stochastic == (True, False, True, False)
    assert torch.equal(explored.sigmas, schedule.sigmas)
    part = Schedule(torch.tensor([1.0, 0.5, 0.2]))
    assert part.exploring((True, True), deterministic_last=True).stochastic == (True, True)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([0.2, 0.5], r"decrease strictly, but sigma\[0\] = 0\.2"),
        ([1.0, 0.5, 0.5, 0.0], r"decrease strictly, but sigma\[1\] = 0\.5"),
        ([1.1, 0.5], r"must lie in \[0, 1\], got 0\.5 to 1\.1"),
        ([0.5, -0.1], r"must lie in \[0, 1\]"),
        ([math.nan, 0.1], r"must lie in \[0, 1\]"),
        ([1.0], "at least two sigmas"),
        ([[1.0, 0.0]], "at least two sigmas in one row"),
    ],
)
def test_bad_sigmas_are_refused(sigmas: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(torch.tensor(sigmas))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        Schedule.shifted(0)
    for shift in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="shift must be positive"):
            Schedule.shifted(4, shift)
    with pytest.raises(ValueError, match="2 stochastic flags for 3 steps"):
        Schedule(torch.tensor([1.0, 0.6, 0.3, 0.0]), (True, False))


def test_rounding_does_not_lift_the_start_above_one() -> None:
    assert float(shift_sigmas(torch.tensor([1.0]), 0.2)) == 1.0


def test_without_a_shift_the_grid_is_even_and_the_last_step_explores_if_told() -> None:
    schedule = Schedule.shifted(4)
    assert schedule.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert schedule.exploring([False, False, False, True]).stochastic == (False, False, False, True)
