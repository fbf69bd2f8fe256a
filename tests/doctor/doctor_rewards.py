"""Rewards for the tests of the check-up, healthy and not, as a user would write them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sage_grpo.rewards.built_in.video_stats import StatisticsBatch, brightness
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.worlds.shapes.judge import ShapesJudge

JUDGE = ShapesJudge()


def pattern(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """How much a clip looks like the picture that its prompt stands for; no statistic of the clip knows that."""
    pictures = torch.stack([keyed_noise(tuple(videos.shape[1:]), "picture", prompt) for prompt in prompts])
    return ((videos.float() - 128) * pictures).mean(dim=(1, 2, 3, 4))


def judged(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    return JUDGE(videos, list(prompts), fps)["TA"]


def constant(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    return torch.full((len(videos),), 0.3)


def luma(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    return brightness(StatisticsBatch(videos, fps)) + 0.001 * torch.tensor([float(len(prompt)) for prompt in prompts])


def broken(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    scores = judged(videos, prompts, fps)
    scores[::2] = torch.nan
    return scores
