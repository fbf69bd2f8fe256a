"""Matching of clips that are noised again: DiffusionNFT (arXiv 2509.16117), and advantage-weighted matching (arXiv 2509.25050)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sage_grpo.objectives.base import LossTerms, NoisedClips, Options, ReplayedStep, without_ratio
from sage_grpo.objectives.options import ObjectiveSpec, Weighting
from sage_grpo.objectives.policy_gradient import surrogate_loss
from sage_grpo.samplers.transition import Gaussian


@dataclass(frozen=True)
class Matching(NoisedClips):
    """Learns all clips of a group by their advantages, against an old policy that may lag behind."""

    @property
    def lags(self) -> bool:  # type: ignore[override]
        return self.spec.old_decay > 0

    def decay(self, iteration: int) -> float:
        return self.spec.old_decay * (min(1.0, iteration / self.spec.old_ramp) if self.spec.old_ramp else 1.0)

    def old_passes(self, updates: int) -> list[bool]:
        """Until the first optimizer step the newest weights are the old ones, unless these lag."""
        return [update > 0 or self.lags for update in range(updates)]


@dataclass(frozen=True)
class Nft(Matching):
    """DiffusionNFT: toward the good clips and away from the bad ones."""

    def remarks(self, updates: int) -> list[str]:
        if any(self.old_passes(updates)):
            return []
        return [
            "objective.kind nft with objective.old_decay 0 and update.updates_per_rollout 1: the old policy is the policy in every update "
            "(matching/moved stays 0), objective.beta does nothing, and what is learned is awm with a clipped advantage. Its authors let the old "
            "policy lag: --objective.old_decay 0.5 --objective.old_ramp 500."
        ]

    def loss(self, step: ReplayedStep) -> LossTerms:
        r = optimality(step.advantage, saturation=self.spec.saturation)
        return nft_loss(self.spec, step.velocity, step.velocity_old, step.x_next, r, sigma=step.sigma)


@dataclass(frozen=True)
class Awm(Matching):
    """Advantage-weighted matching: the policy gradient on the law of the velocity, or on another weighting of its error."""

    def loss(self, step: ReplayedStep) -> LossTerms:
        return surrogate_loss(self.surrogate, step, self.clip_range(step.dims))

    def refusals(self, config: Options) -> dict[str, bool]:
        updates = config.update.updates_per_rollout
        return super().refusals(config) | {
            f"objective.old_samples false and {updates} updates: the ratio would need the rollout's weights as well, "
            "set update.updates_per_rollout 1": not self.spec.old_samples and updates > 1
        }

    def log_prob(self, gaussian: Gaussian, velocity: Tensor, x_next: Tensor, sigma: float) -> Tensor:
        if self.spec.weight == "ghuber":
            return ghuber_log_prob(velocity, x_next, sigma=sigma)
        return super().log_prob(gaussian, velocity, x_next, sigma)


SMALLEST = 1e-5
"""The mean absolute error that an adaptive weight divides by is at least this."""


def optimality(advantage: Tensor, *, saturation: float = 1.0) -> Tensor:
    """r = 1/2 + clip(A / saturation, -1, 1) / 2: how good a clip is, from 0 to 1."""
    return 0.5 + 0.5 * (advantage / saturation).clamp(-1.0, 1.0)


def nft_loss(spec: ObjectiveSpec, v: Tensor, v_old: Tensor, target: Tensor, r: Tensor, *, sigma: float) -> LossTerms:
    """s (r w+ |v+ - u|^2 + (1 - r) w- |v- - u|^2) / beta, a mean over dimensions, with v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old -
    beta v; u = eps - x0 is the target, s the saturation of r. The factor s / beta makes the learning rate mean the same for every beta and s.
    """
    beta, weight = spec.beta, spec.weight
    positive = (1.0 - beta) * v_old + beta * v - target
    negative = (1.0 + beta) * v_old - beta * v - target
    loss = (r * _error(positive, sigma, weight) + (1.0 - r) * _error(negative, sigma, weight)) / beta
    return without_ratio(spec.saturation * loss)


def _error(difference: Tensor, sigma: float, weight: Weighting) -> Tensor:
    rows = difference.flatten(1)
    square = rows.square().mean(1)
    return sigma * square / rows.detach().abs().mean(1).clamp(min=SMALLEST) if weight == "adaptive" else square


POWER = 0.25
"""The mean squared error is taken to this power, as in all of their released configurations."""
TINY = 1e-10
"""Added to the mean squared error: its root has no slope at 0."""


def ghuber_log_prob(v: Tensor, target: Tensor, *, sigma: float) -> Tensor:
    """log p = -(sigma / p) ((E + e)^p - e^p) per sample, with E the mean square of v - target over dimensions: not the density of a Gaussian,
    so the KL remains the mean square of the difference of two velocities."""
    error = (v - target).square().flatten(1).mean(1)
    return -(sigma / POWER) * ((error + TINY).pow(POWER) - math.pow(TINY, POWER))
