"""The protocol of objectives: the loss of a replayed step, and all that rollout, plan, cost model and checkpoints must know of it.

`objective.kind` names one of this folder's classes, or a subclass of one by its import path. No other room asks which objective it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from sage_grpo.config.ranges import refuse
from sage_grpo.data.groups import BatchConfig
from sage_grpo.objectives.advantage import best_and_worst
from sage_grpo.objectives.options import ObjectiveSpec, SurrogateConfig
from sage_grpo.samplers.kernels import Kernel, Sigma
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Gaussian, Transition


@dataclass(frozen=True)
class LossTerms:
    """A loss with diagnostics, one value per clip."""

    loss: Tensor
    """To be minimized."""
    ratio: Tensor | None = None
    """The (possibly centered) probability ratio, detached; None for a loss without one."""
    inactive: Tensor | None = None
    """bool; True where the trust region removes the gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further diagnostics by name, detached; the log has their weighted means."""


@dataclass(frozen=True)
class PreferencePair:
    """The preference pairs of a replay's clips, by clip."""

    rows: Tensor
    """Indices among all clips of the iteration."""
    partners: Tensor
    """Index of the other clip of each pair; a clip without a pair has its own."""
    side: Tensor
    """1 for the better clip of a pair, -1 for the worse, 0 without a pair."""
    partner_excess: Tensor


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step as a loss sees it. Values have one row per clip; velocities one per state, which clips of a group may share."""

    velocity: Tensor
    """Of the policy that is trained, with a graph."""
    velocity_old: Tensor
    """Of the rollout's policy, or of a lagging old policy; the detached `velocity` where neither was kept."""
    velocity_reference: Tensor
    """Of the reference; the detached `velocity` where the policy equals it, or where there is none."""
    x_next: Tensor
    """State after the step; at a fresh noise level the target velocity eps - x0."""
    log_prob: Tensor
    log_prob_old: Tensor
    advantage: Tensor
    sigma: float
    std: Tensor
    kl_old: Tensor | None = None
    """Exact KL to the rollout's policy, where the objective needs its velocities."""
    reward_gradient: Tensor | None = None
    """Gradient of the reward at the state after the step."""
    length: float = 0.0
    """Length of the step: the state after it is x + length v."""
    pair: PreferencePair | None = None

    @property
    def dims(self) -> int:
        return self.velocity[0].numel()


@dataclass(frozen=True)
class NoiseLevels:
    """The noise levels of a group, shared by its members: the common part of their errors then cancels, as in advantages."""

    schedule: Schedule
    """The levels from high to low, each the start of a step."""
    labels: tuple[int, ...]
    """For every level, the step of the run's grid that contains it, under which it is logged."""
    kernel: Kernel
    """Distribution of the target at a level."""
    visited: bool = False
    """True if the states of the rollout are learned at these levels, not clean clips that are noised again."""
    rollout: Schedule | None = None
    """The steps of the rollout, where they are not the run's grid."""


FIRST, LAST = 1, 0.9
"""Bounds of objective.draw strata: the first step that is learned, and the share of the schedule after which none is (AWM's int(0.9 N))."""


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


Options: TypeAlias = Any
"""The configuration of a run, a TrainConfig, which imports this room."""


@dataclass(frozen=True)
class Objective:
    """An objective. Subclasses give `loss`, and override what differs."""

    spec: ObjectiveSpec = ObjectiveSpec()
    surrogate: SurrogateConfig = SurrogateConfig()

    samples: ClassVar[Literal["sde", "ode"]] = "sde"
    """The rollout that it learns from: steps that explore, or clips of the ODE."""
    chooses: ClassVar[bool] = False
    """True if clips are learned because they were chosen, by their rewards or by the user, and not by their advantages."""
    differentiates: ClassVar[bool] = False
    """True if it learns from the gradient of the reward at the clip."""
    given_clips: ClassVar[int] = 0
    """Clips of a row of data.clips that it can learn from in place of a rollout; 0 if it cannot."""
    in_pairs: ClassVar[bool] = False
    """True if clips are learned in pairs: a loss depends on the error of the partner, maybe on another rank, which takes a further pass."""
    lags: ClassVar[bool] = False
    """True if its old policy differs from the newest weights between iterations."""

    def loss(self, step: ReplayedStep) -> LossTerms:
        """The loss of every clip at one step."""
        raise NotImplementedError

    def metrics(self, step: ReplayedStep) -> Mapping[str, Tensor]:
        return {}

    def log_prob(self, gaussian: Gaussian, velocity: Tensor, x_next: Tensor, sigma: float) -> Tensor:
        """Log-probability of x_next for the ratio."""
        return gaussian.expand(len(x_next)).log_prob(x_next)

    @property
    def needs_velocity_old(self) -> bool:
        return bool(self.surrogate.centred) or self.surrogate.kind == "kl_mask"

    def clip_range(self, dims: int) -> float:
        """c / sqrt(D): the noise of a log-ratio that is a mean over D dimensions falls as 1 / sqrt(D)."""
        given = self.surrogate.clip_range
        return self.surrogate.clip_scale / math.sqrt(dims) if given is None else given

    def scale(self, dims: int) -> float:
        """sqrt(D), the factor on the loss: with it learning rate, AdamW's epsilon and the clipping norm mean the same at any resolution."""
        return math.sqrt(dims)

    def targets(self, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
        """The noise levels that a group trains, drawn; only where it samples with the ODE. Pure: the cost model asks, too."""
        raise NotImplementedError

    def order(self, levels: int) -> tuple[int, ...] | None:
        """The order in which the one update of a rollout trains its levels; None deals them out to the updates."""
        return None

    def choose(self, advantages: Sequence[float], valid: Sequence[bool], batch: BatchConfig) -> list[tuple[int, ...]]:
        """Trained units of a group, as places: clips, or pairs of clips, the better one first, which stay in one update."""
        return [(place,) for place in best_and_worst(advantages, valid, batch.trained)]

    def old_passes(self, updates: int) -> list[bool]:
        """A flag per update of a rollout, True where it runs the old policy."""
        return [False] * updates

    def decay(self, iteration: int) -> float:
        """Share of a lagging old policy that stays after this many iterations."""
        raise NotImplementedError

    def partner_excess(self, velocity: Tensor, reference: Tensor, target: Tensor) -> Tensor:
        """The value of a clip that the loss of its partner needs; only where clips are trained in pairs."""
        raise NotImplementedError

    def remarks(self, updates: int) -> list[str]:
        """Remarks on likely mistakes, for a run with so many updates per rollout."""
        return []

    def refusals(self, config: Options) -> dict[str, bool]:
        """Reasons not to run with this configuration, each with its remedy, and whether it holds."""
        return {}

    def check(self, config: Options) -> None:
        refuse(self.refusals(config), f"objective.kind {self.spec.kind}")


@dataclass(frozen=True)
class OdeObjective(Objective):
    """An objective whose clips are sampled with the ODE: no step explores."""

    samples: ClassVar[Literal["sde", "ode"]] = "ode"

    def refusals(self, config: Options) -> dict[str, bool]:
        rollout, update, spec = config.rollout, config.update, self.spec
        return {
            f"kernel.name {config.kernel.name}: it samples with the ODE, set ode": config.kernel.name != "ode",
            f"rollout.window.kind {rollout.window.kind}: no step explores, leave it all": rollout.window.kind != "all",
            "rollout.same_noise true: without exploration a group would be one clip, set false": rollout.same_noise,
            "surrogate.equalize true: levels are weighed by objective.weight, set false": self.surrogate.equalize,
            f"update.step_fraction {update.step_fraction:g}: objective.levels says how much is learned, set 1": (
                update.step_fraction < 1
            ),
            "optimizer.target_kl or max_kl: no path with noise has a KL, leave them out": config.optimizer.measures_kl,
            f"objective.levels {spec.levels} for {update.updates_per_rollout} updates: each needs one, or update.repeat": (
                spec.levels < update.updates_per_rollout and update.deals_steps
            ),
            f"rollout.staleness {rollout.staleness}: it learns without the log-probability of the policy that sampled, by which old clips are "
            "weighed; set 0, or use an objective that explores (branch, sage)": rollout.staleness > 0,
        }


@dataclass(frozen=True)
class NoisedClips(OdeObjective):
    """An objective that learns clean clips at fresh noise levels."""

    def targets(self, grid: Schedule, trains: Callable[[float], bool], draw: Random) -> NoiseLevels:
        spec, sigmas = self.spec, grid.sigmas.tolist()
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

    def metrics(self, step: ReplayedStep) -> Mapping[str, Tensor]:
        """The squared error of the velocity, and its squared distance from the old policy's."""
        v = step.velocity.detach()
        others = {"matching/error": step.x_next, "matching/moved": step.velocity_old}
        return {name: (v - other).square().flatten(1).mean(1) for name, other in others.items()}


def without_ratio(loss: Tensor, **metrics: Tensor) -> LossTerms:
    return LossTerms(loss=loss, inactive=torch.zeros_like(loss, dtype=torch.bool), metrics=metrics)
