"""Solvers of the deterministic steps: order of convergence on a law whose velocity is known."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.solvers import Stepper


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Of Gaussian data with variance 4: linear in x."""
    spread = 4 * (1 - sigma) ** 2 + sigma**2
    return x * (sigma - 4 * (1 - sigma)) / spread


def integrate(solver: str, steps: int, shift: float) -> float:
    """Where the path that starts at 1 ends; the exact answer is 2."""
    sigmas = Schedule.shifted(steps, shift).sigmas.double().tolist()
    x, stepper = torch.ones((), dtype=torch.float64), Stepper(solver)
    for sigma, sigma_next in pairwise(sigmas):
        v = velocity(x, sigma)
        x = stepper(x + (sigma_next - sigma) * v, v, sigma, sigma_next)
    return float(x)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("ab2", 2)])
def test_order_of_convergence(solver: str, order: int) -> None:
    coarse, fine = (abs(integrate(solver, steps, 5.0) - 2.0) for steps in (80, 160))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize(("before", "after"), [(None, None), (3, None), (None, 2), (2, 30)])
def test_around_keeps_the_exploring_steps_and_the_ends(before, after) -> None:
    base = Schedule.shifted(12, 5.0).exploring([5 <= index < 7 for index in range(12)])
    other = base.around(before, after)
    first = 5 if before is None else before
    assert other.exploring_range() == (first, first + 2)
    assert other.num_steps == first + 2 + (5 if after is None else after)
    assert torch.equal(other.sigmas[first : first + 3], base.sigmas[5:8])
    assert (float(other.sigmas[0]), float(other.sigmas[-1])) == (1.0, 0.0)
    if before is None and after is None:
        assert torch.equal(other.sigmas, base.sigmas)


def test_around_leaves_an_empty_part_empty() -> None:
    base = Schedule.shifted(6, 5.0).exploring([True] + [False] * 5).around(4, 2)
    assert (base.exploring_range(), base.num_steps) == ((0, 1), 3)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 7)])
@pytest.mark.parametrize("steps", [1, 3])
def test_around_puts_new_sigmas_on_the_line_through_the_old_ones(before: int, after: int, steps: int) -> None:
    """Evenly in the old step's index; parts of one step too."""
    base = Schedule.shifted(2 * steps + 1, 3.0).exploring([index == steps for index in range(2 * steps + 1)])
    other = base.around(before, after)
    old = base.sigmas.double().tolist()

    def line(first: int, stop: int, count: int) -> list[float]:
        places = [first + (stop - first) * number / count for number in range(count + 1)]
        below = [min(math.floor(place), stop - 1) for place in places]
        return [old[low] + (old[low + 1] - old[low]) * (place - low) for low, place in zip(below, places)]

    expected = line(0, steps, before) + line(steps + 1, 2 * steps + 1, after)
    assert other.sigmas.tolist() == pytest.approx(expected, abs=1e-6)
