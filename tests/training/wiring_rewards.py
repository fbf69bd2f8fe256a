"""Rewards of the wiring tests: two with the same parts, which rank clips differently."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def two_parts(videos: Tensor, prompts: Sequence[str], fps: float, offset: float = 0.0) -> dict[str, Tensor]:
    """Two parts that rank clips differently."""
    return {"level": _level(videos) + offset, "texture": videos[..., 0].float().std(dim=(1, 2, 3)) / 255}


def other_parts(videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
    """Another reward with the same parts."""
    return {"level": _level(videos) ** 2, "texture": videos[..., 1].float().std(dim=(1, 2, 3)) / 255}


def _level(videos: Tensor) -> Tensor:
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255
