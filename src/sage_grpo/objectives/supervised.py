"""Flow matching of a group's best clips, or of given ones (supervised and reward-weighted fine-tuning, SFT and RFT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sage_grpo.data.groups import BatchConfig
from sage_grpo.objectives.advantage import best
from sage_grpo.objectives.base import LossTerms, NoisedClips, Options, ReplayedStep, without_ratio


@dataclass(frozen=True)
class Supervised(NoisedClips):
    """|v - u|^2 of the chosen clips, a mean over dimensions; u = eps - x0 is the target."""

    chooses: ClassVar[bool] = True
    given_clips: ClassVar[int] = 1

    def loss(self, step: ReplayedStep) -> LossTerms:
        return without_ratio((step.velocity - step.x_next).square().flatten(1).mean(1))

    def choose(self, advantages: Sequence[float], valid: Sequence[bool], batch: BatchConfig) -> list[tuple[int, ...]]:
        return [(place,) for place in best(advantages, valid, batch.best)]

    def refusals(self, config: Options) -> dict[str, bool]:
        mode = config.trust_region.mode
        return super().refusals(config) | {
            "surrogate.centred or kl_mask: there is no ratio, leave them out": self.needs_velocity_old,
            f"trust_region.mode {mode}: there is no old policy, set none, fixed or moving": config.trust_region.uses_stepwise,
        }
