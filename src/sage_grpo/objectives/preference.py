"""Preference of one clip to another: Diffusion-DPO (arXiv 2311.12908), on velocities as in Flow-DPO (arXiv 2501.13918)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from sage_grpo.data.groups import BatchConfig
from sage_grpo.objectives.advantage import best_against_worst
from sage_grpo.objectives.base import LossTerms, NoisedClips, Options, ReplayedStep, without_ratio


@dataclass(frozen=True)
class Preference(NoisedClips):
    """The best clip of a group is preferred to the worst, by the excess of the policy's error over the reference's."""

    chooses: ClassVar[bool] = True
    given_clips: ClassVar[int] = 2
    in_pairs: ClassVar[bool] = True

    def loss(self, step: ReplayedStep) -> LossTerms:
        assert step.pair is not None
        excess = self.partner_excess(step.velocity, step.velocity_reference, step.x_next)
        lead = dpo_lead(excess, step.pair.partner_excess.to(excess), step.pair.side.to(excess), beta=self.spec.beta)
        terms = dpo_loss(lead)
        lead = lead.detach()
        return LossTerms(
            terms.loss, None, terms.inactive, {"preference/lead": lead, "preference/accuracy": (lead > 0).to(lead)}
        )

    def partner_excess(self, velocity: Tensor, reference: Tensor, target: Tensor) -> Tensor:
        """|v - u|^2 - |v_ref - u|^2 per sample, a mean over dimensions; u is the target. Negative where the policy predicts the clip better than
        the reference does. Written as a product, which is exactly 0 at the reference and loses no digits beside it."""
        return ((velocity - reference) * (velocity + reference - 2.0 * target)).flatten(1).mean(1)

    def choose(self, advantages: Sequence[float], valid: Sequence[bool], batch: BatchConfig) -> list[tuple[int, ...]]:
        return [*best_against_worst(advantages, valid, batch.pairs)]

    def refusals(self, config: Options) -> dict[str, bool]:
        region = config.trust_region
        return super().refusals(config) | {
            "surrogate.centred or kl_mask: there is no ratio, leave them out": self.needs_velocity_old,
            f"trust_region.mode {region.mode}: it compares with the anchor, set fixed (the start's weights) or moving": (
                region.uses_stepwise or not region.uses_anchor
            ),
        }


def dpo_lead(excess: Tensor, partner: Tensor, side: Tensor, *, beta: float) -> Tensor:
    """The policy's preference for the better clip of each pair, in log-odds: beta / 2 (excess of the worse - excess of the better)."""
    return 0.5 * beta * side * (partner - excess)


def dpo_loss(lead: Tensor) -> LossTerms:
    """-log sigmoid(lead) per clip, where the partner's half of the lead is a constant: both clips of a pair carry its loss, so that each counts
    twice in the gradient and once in the value of a mean over clips."""
    pair = F.softplus(-lead)
    return without_ratio(2.0 * pair - pair.detach())
