"""The same reward as the peer asks for it."""

from __future__ import annotations

from typing import Any

import torch
from flow_factory.rewards import PointwiseRewardModel, RewardModelOutput


class Brightness(PointwiseRewardModel):
    """Mean brightness of float clips T x C x H x W in [0, 1]."""

    required_fields = ("prompt", "video")
    use_tensor_inputs = True

    @torch.no_grad()
    def __call__(self, prompt: list[str], video: Any = None) -> RewardModelOutput:
        return RewardModelOutput(rewards=torch.stack([clip.float().mean() for clip in video]).cpu())
