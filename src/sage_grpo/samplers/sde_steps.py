"""Selection of the exploring steps: wanted steps at the end of a grid are left out if no later step would remove their noise.

The variance of an Itô step is not matched to the noise of sigma_next. Into sigma = 0 all of its noise stays in the video. Into a small sigma, as in
grids whose last but one value is near 0 (SD3: 0.0089), the state holds many times the noise of that sigma, and most of it stays,
too. Coefficient-preserving kernels use the next sigma and hold exactly the right amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sage_grpo.samplers.kernels import EXACT, Kernel
from sage_grpo.samplers.schedule import Schedule

HELD_LIMIT = 3.5
"""A step near the end explores as long as the state then holds at most so many times the noise variance of sigma_next. Above the largest
published measurement here, 3.0 (dance at eta 1.37, six steps), below the 3.8 and more of grids that end near 0."""


def held_noise(kernel: Kernel, schedule: Schedule) -> Tensor:
    """Noise variance after each step over that of its sigma_next, for point data and a state that was right before the step; 1 is right.

    Infinite for noise that goes into sigma = 0; float64, one value per step, as if all of them explored.
    """
    sigmas = schedule.sigmas.to(torch.float64)
    p, q = sigmas[:-1], sigmas[1:]
    step = kernel(p, q)
    kept = (step.a * p + step.b).square() + step.std.square()
    return torch.where((q == 0) & (kept == 0), 1.0, kept / q.square())


def overfull(kernel: Kernel, schedule: Schedule) -> list[int]:
    """The steps at the end of the grid, before the very last, whose noise would be above the limit."""
    held = held_noise(kernel, schedule).tolist()
    last = schedule.num_steps - (1 if float(schedule.sigmas[-1]) == 0.0 else 0)
    first = last
    while first > 0 and held[first - 1] > HELD_LIMIT:
        first -= 1
    return list(range(first, last))


def swallowed(kernel: Kernel, schedule: Schedule) -> list[int]:
    """The steps, before the very last, in which the kernel has no noise: those above a clamp."""
    sigma, sigma_next = schedule.sigmas[:-1], schedule.sigmas[1:]
    return ((kernel(sigma, sigma_next).std == 0) & (sigma_next > 0)).nonzero()[:, 0].tolist()


def explore(grid: Schedule, wanted: Sequence[bool], kernel: Kernel, deterministic_last: bool | None) -> Schedule:
    """The grid with the wanted steps stochastic. None makes the last step deterministic where the kernel leaves noise, and those before it that
    hold too much; true the last step alone; false none (as in the paper)."""
    last = kernel.leaves_noise if deterministic_last is None else deterministic_last
    schedule = grid.exploring(wanted, deterministic_last=last)
    quiet = set(swallowed(kernel, grid))
    if deterministic_last is None:  # coefficient-preserving kernels never hold too much
        quiet |= set(overfull(kernel, grid))
    flags = [flag and index not in quiet for index, flag in enumerate(schedule.stochastic)]
    return replace(schedule, stochastic=tuple(flags))


def left_out(grid: Schedule, wanted: Sequence[bool], kernel: Kernel, deterministic_last: bool | None) -> str | None:
    """A sentence on the wanted steps before the last that do not explore because they would hold too much noise; None where there are none."""
    steps = [] if deterministic_last is not None else [index for index in overfull(kernel, grid) if wanted[index]]
    if not steps:
        return None
    held = held_noise(kernel, grid)[steps]
    which = f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} are"
    return (
        f"{which} deterministic, too: with noise the state would hold {float(held.max()):.3g} times the noise variance of "
        f"sigma {float(grid.sigmas[steps[int(held.argmax())] + 1]):.3g} (the limit is {HELD_LIMIT:g}). rollout.deterministic_last true lets it explore; "
        f"kernel.name {EXACT} hold exactly the right amount"
    )
