"""The toy model with classifier-free guidance: a negative prompt, and a scale that the policy may override."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.models.base import Abilities
from sage_grpo.models.spec import ModelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.types import Conditioning
from trainer_zoo.toy import WORDS, ToyModel


class GuidedToy(ToyModel):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.guidance_scale = 6.0 if spec.guidance_scale is None else spec.guidance_scale

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        negative = {"words": keyed_noise((WORDS,), "word", self.spec.negative_prompt)}
        return [Conditioning(one.tensors, negative) for one in super().encode(prompts, images)]

    def velocity(
        self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance: float | None = None
    ) -> Tensor:
        scale = self.guidance_scale if guidance is None else guidance
        v = super().velocity(x, sigma, conditions)
        if scale == 1:
            return v
        negatives = [Conditioning(condition.negative or {}) for condition in conditions]
        v_negative = super().velocity(x, sigma, negatives)
        v_negative = v_negative if self.spec.negative_gradient else v_negative.detach()
        return v + (scale - 1) * (v - v_negative)

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, branches=self.branches)

    def branches(self, sigma: Tensor | float, guidance: float | None = None) -> int:
        return 1 if (self.guidance_scale if guidance is None else guidance) == 1 else 2


def load(spec: ModelSpec, device: str | torch.device | Path | None = None) -> GuidedToy:
    return GuidedToy(spec)
