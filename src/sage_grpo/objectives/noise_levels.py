"""Objectives on clean clips that are noised again: the levels at which they are learned, and the law of the velocity there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from sage_grpo.objectives.base import NoiseLevels, OdeObjective, ReplayedStep
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.samplers.kernels import Sigma
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Transition

FIRST, LAST = 1, 0.9
"""Bounds of objective.draw strata: the first step that is learned, and the share of the schedule after which none is
(int(0.9 N), as the authors of AWM count)."""


@dataclass(frozen=True)
class VelocityLaw:
    """u ~ Normal(v, 1 / (2 w)) for the target u = eps - x0: log p(u) = -w mean((u - v)^2) + const, the flow-matching loss.

    So advantage-weighted matching (arXiv 2509.25050) is the policy gradient on this law: its ratio, its clip, and a KL of
    w mean((v - v_ref)^2) follow from the three scalars as they do for a step.
    """

    by_sigma: bool = False
    """w = sigma instead of 1."""
    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        """The law at sigma; there is no next sigma, so `sigma_next` is ignored."""
        level = torch.as_tensor(sigma, dtype=torch.float32)
        weight = level if self.by_sigma else torch.ones_like(level)
        return Transition(a=torch.zeros_like(level), b=torch.ones_like(level), std=(2.0 * weight).rsqrt())


@dataclass(frozen=True)
class NoisedClips(OdeObjective):
    """An objective that learns clean clips at fresh noise levels."""

    def targets(self, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
        return draw_levels(self.spec, grid, trains, draw)

    def metrics(self, step: ReplayedStep) -> Mapping[str, Tensor]:
        """The squared error of the velocity, and its squared distance from the old policy's."""
        v = step.velocity.detach()
        others = {"matching/error": step.x_next, "matching/moved": step.velocity_old}
        return {name: (v - other).square().flatten(1).mean(1) for name, other in others.items()}

    def weight(self, sigma: float) -> float:
        """Weight of a level's squared error."""
        return sigma if self.spec.weight == "sigma" else 1.0


def draw_levels(spec: ObjectiveSpec, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
    """Draw levels along the grid at which the trained network runs."""
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
        chosen = sorted(draw.sample(steps, spec.levels)) if spec.draw == "schedule" else _strata(spec, steps, draw)
        values = [sigmas[step] for step in chosen]
    else:
        # Between two steps another expert may take over.
        steps = [step for step in steps if trains(sigmas[step + 1])]
        if not steps:
            raise ValueError(
                f"objective.draw {spec.draw} needs two steps of the schedule where the trained network runs: use schedule, or take "
                "more rollout.steps."
            )
        places = [place * len(steps) for place in _places(spec, draw)]
        chosen = [steps[int(place)] for place in places]
        values = [sigmas[step] + place % 1 * (sigmas[step + 1] - sigmas[step]) for step, place in zip(chosen, places)]
    schedule = Schedule(torch.tensor([*values, 0.0]))
    return NoiseLevels(schedule, tuple(chosen), VelocityLaw(by_sigma=spec.weight == "sigma"))


def _strata(spec: ObjectiveSpec, steps: Sequence[int], draw: Random) -> list[int]:
    """One step from each of `spec.levels` parts of the steps, as equal as whole steps allow."""
    edges = [part * len(steps) // spec.levels for part in range(spec.levels + 1)]
    return [steps[draw.randrange(first, end)] for first, end in pairwise(edges)]


def _places(spec: ObjectiveSpec, draw: Random) -> list[float]:
    """Positions along the schedule, in (0, 1) and rising: one in each part of equal probability."""
    even = [(part + 0.01 + 0.98 * draw.random()) / spec.levels for part in range(spec.levels)]
    if spec.draw == "uniform":
        return even
    return [1.0 / (1.0 + math.exp(-NormalDist().inv_cdf(place))) for place in even]
