"""Fresh noise levels at which the clips of a group are learned: pure data, drawn by key."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import torch

from sage_grpo.flow.kernels import Kernel
from sage_grpo.flow.matching import Matching
from sage_grpo.flow.schedule import Schedule
from sage_grpo.rl.objective import ObjectiveSpec

FIRST, LAST = 1, 0.9
"""strata: the first step that is learned, and the share of the schedule after which none is (int(0.9 N), as the authors of AWM count)."""


@dataclass(frozen=True)
class Levels:
    """The noise levels of a group. Its members share them: what their errors have in common then cancels, as advantages do."""

    schedule: Schedule
    """The levels from high to low, each the start of a step."""
    labels: tuple[int, ...]
    """For every level the step of the run's grid in which it lies, by which it is logged."""
    kernel: Kernel
    """The law of the target at a level."""


def draw_levels(spec: ObjectiveSpec, grid: Schedule, trains: Callable[[float], bool], rng: random.Random) -> Levels:
    """Levels along the grid where the trained network runs."""
    sigmas = grid.sigmas.tolist()
    steps = [step for step in range(grid.num_steps) if trains(sigmas[step])]
    if spec.draw in ("schedule", "strata"):
        if spec.draw == "strata":
            steps = [step for step in steps if FIRST <= step < int(LAST * grid.num_steps)]
        if spec.levels > len(steps):
            without = " (without its first step and last tenth)" if spec.draw == "strata" else ""
            raise ValueError(
                f"objective.levels is {spec.levels}, but the trained network runs at {len(steps)} step(s) of the schedule{without}: use "
                "fewer levels, more rollout.steps, or objective.draw uniform."
            )
        chosen = sorted(rng.sample(steps, spec.levels)) if spec.draw == "schedule" else _strata(spec, steps, rng)
        values = [sigmas[step] for step in chosen]
    else:
        # Between two steps another expert may take over.
        steps = [step for step in steps if trains(sigmas[step + 1])]
        if not steps:
            raise ValueError(
                f"objective.draw {spec.draw} needs two steps of the schedule where the trained network runs: use schedule, or take "
                "more rollout.steps."
            )
        places = [place * len(steps) for place in _places(spec, rng)]
        chosen = [steps[int(place)] for place in places]
        values = [sigmas[step] + place % 1 * (sigmas[step + 1] - sigmas[step]) for step, place in zip(chosen, places)]
    schedule = Schedule(torch.tensor([*values, 0.0]))
    return Levels(schedule, tuple(chosen), Matching(by_sigma=spec.weight == "sigma"))


def _strata(spec: ObjectiveSpec, steps: Sequence[int], rng: random.Random) -> list[int]:
    """One step of each of so many parts of the steps, which are as equal as whole steps allow."""
    edges = [part * len(steps) // spec.levels for part in range(spec.levels + 1)]
    return [steps[rng.randrange(first, end)] for first, end in pairwise(edges)]


def _places(spec: ObjectiveSpec, rng: random.Random) -> list[float]:
    """Places along the schedule, in (0, 1) and rising: one in each equal part of what is drawn from, and never two at once."""
    even = [(part + 0.01 + 0.98 * rng.random()) / spec.levels for part in range(spec.levels)]
    if spec.draw == "uniform":
        return even
    return [1.0 / (1.0 + math.exp(-NormalDist().inv_cdf(place))) for place in even]
