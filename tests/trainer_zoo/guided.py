"""The toy model with classifier-free guidance: a negative prompt, and a scale that the policy may override."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.flow.noise import keyed_noise
from sage_grpo.models.spec import ModelSpec
from sage_grpo.types import Conditioning
from trainer_zoo.toy import WORDS, ToyModel


class GuidedToy(ToyModel):
    """v_negative + scale (v - v_negative)."""

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
        negatives = [Conditioning(condition.negative or {}) for condition in conditions]
        v_negative = super().velocity(x, sigma, negatives)
        v_negative = v_negative if self.spec.negative_gradient else v_negative.detach()
        return v if scale == 1 else v + (scale - 1) * (v - v_negative)


def load(spec: ModelSpec, device: str | torch.device | Path | None = None) -> GuidedToy:
    """What `model.family` calls."""
    return GuidedToy(spec)
