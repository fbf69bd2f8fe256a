"""Objectives on clean clips that are noised again: the levels at which they are learned, and the law of the velocity there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random
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
    """u ~ Normal(v, 1 / 2) for the target u = eps - x0: log p(u) = -mean((u - v)^2) + const, the flow-matching loss.

    So advantage-weighted matching (arXiv 2509.25050) is the policy gradient on this law: its ratio, its clip, and a KL of
    mean((v - v_ref)^2) follow from the three scalars as they do for a step.
    """

    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        one = torch.ones_like(torch.as_tensor(sigma, dtype=torch.float32))
        return Transition(a=torch.zeros_like(one), b=one, std=(2.0 * one).rsqrt())


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


def draw_levels(spec: ObjectiveSpec, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
    sigmas = grid.sigmas.tolist()
    steps = [step for step in range(grid.num_steps) if trains(sigmas[step])]
    if spec.draw == "strata":
        steps = [step for step in steps if FIRST <= step < int(LAST * grid.num_steps)]
    if spec.levels > len(steps):
        without = " (without its first step and last tenth)" if spec.draw == "strata" else ""
        raise ValueError(
            f"objective.levels is {spec.levels}, but the trained network runs at {len(steps)} step(s) of the schedule{without}: use "
            "fewer levels, or more rollout.steps."
        )
    if spec.draw == "strata":  # one step from each of equal parts
        edges = [part * len(steps) // spec.levels for part in range(spec.levels + 1)]
        chosen = [steps[draw.randrange(first, end)] for first, end in pairwise(edges)]
    else:
        chosen = sorted(draw.sample(steps, spec.levels))
    schedule = Schedule(torch.tensor([*(sigmas[step] for step in chosen), 0.0]))
    return NoiseLevels(schedule, tuple(chosen), VelocityLaw())
