"""The gradient of the reward, carried back from the clip to steps of its ODE rollout: ReFL (arXiv 2304.05977) and DRaFT (arXiv 2309.17400)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch

from sage_grpo.objectives.base import (
    LossTerms,
    NoiseLevels,
    OdeObjective,
    Options,
    ReplayedStep,
    VelocityLaw,
    without_ratio,
)
from sage_grpo.samplers.schedule import Schedule


@dataclass(frozen=True)
class RewardGradient(OdeObjective):
    """Minus the reward to first order: -length <dR/dx_next, v> at every trained step."""

    differentiates: ClassVar[bool] = True

    def loss(self, step: ReplayedStep) -> LossTerms:
        assert step.reward_gradient is not None
        v = step.velocity
        return without_ratio(-step.length * (step.reward_gradient.to(v.device) * v).flatten(1).sum(1))

    def scale(self, dims: int) -> float:
        """1: a reward is of order 1 at any size."""
        return 1.0

    def targets(self, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
        """Steps of the rollout that are trained; with `predict` it is cut short by a prediction of the clip."""
        spec, sigmas = self.spec, grid.sigmas.tolist()
        steps = [step for step in range(len(sigmas) - 1) if trains(sigmas[step])]
        ends = [len(sigmas) - 2]
        if spec.predict is not None:
            ends = [step for step in steps if step >= (1 - spec.predict) * (len(sigmas) - 1)] or steps[-1:] or ends
        # The shortest rollout decides, so that a run is refused at its start and not at an iteration that draws it.
        fewest = [step for step in steps if step <= ends[0]]
        if len(fewest) < spec.levels or (spec.draw != "schedule" and fewest[-spec.levels] != ends[0] + 1 - spec.levels):
            raise ValueError(
                f"objective.levels is {spec.levels}, but the trained network runs at steps {fewest} of the {ends[0] + 1} of a rollout: use "
                "fewer levels, or more rollout.steps."
            )
        if spec.predict is not None:
            end = draw.choice(ends)
            sigmas, steps = [*sigmas[: end + 1], 0.0], [step for step in steps if step <= end]
        last = list(range(len(sigmas) - 1))[-spec.levels :]
        chosen = sorted(draw.sample(steps, spec.levels)) if spec.draw == "schedule" else last
        levels = Schedule(torch.tensor([*(sigmas[step] for step in chosen), 0.0]))
        rollout = Schedule(torch.tensor(sigmas)).exploring((False,) * (len(sigmas) - 1))
        return NoiseLevels(levels, tuple(chosen), VelocityLaw(), visited=True, rollout=rollout)

    def order(self, levels: int) -> tuple[int, ...]:
        """Backward from the clip: an exact gradient of a step needs that of the next."""
        return tuple(reversed(range(levels)))

    def refusals(self, config: Options) -> dict[str, bool]:
        solver, updates, mode = config.rollout.solver, config.update.updates_per_rollout, config.trust_region.mode
        return super().refusals(config) | {
            f"rollout.solver {solver}: a gradient is carried over Euler steps, set euler": solver != "euler",
            f"update.updates_per_rollout {updates}: a gradient is that of the clip's own weights, set 1": updates != 1,
            f"objective.credit exact and trust_region.mode {mode}: a KL would be carried back as if it were reward, set none": (
                self.spec.credit == "exact" and mode != "none"
            ),
            "surrogate.centred or kl_mask: there is no ratio, leave them out": self.needs_velocity_old,
        }
