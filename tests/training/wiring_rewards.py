"""Rewards of the wiring tests: two with the same parts, which rank clips differently."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CALLS: dict[str, Any] = {"count": 0}
"""How often a reward was called, and where its last clips and its thread were."""


def two_parts(videos: Tensor, prompts: Sequence[str], fps: float, offset: float = 0.0) -> dict[str, Tensor]:
    """Two parts that rank clips differently; counts its calls and notes where the clips are."""
    CALLS["count"] += 1
    CALLS["device"] = videos.device.type
    CALLS["thread"] = threading.current_thread() is threading.main_thread()
    level = torch.arange(len(videos)) / 8 if videos.is_meta else _level(videos)
    texture = level * 0 if videos.is_meta else videos[..., 0].float().std(dim=(1, 2, 3)) / 255
    return {"level": level + offset, "texture": texture}


def other_parts(videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
    """Another reward with the same parts."""
    return {"level": _level(videos) ** 2, "texture": videos[..., 1].float().std(dim=(1, 2, 3)) / 255}


def picky(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """Cannot score the clips of one prompt, and says so for the whole batch."""
    CALLS["count"] += 1
    if "an ox" in prompts:
        raise ValueError("no oxen")
    return _level(videos)


def _level(videos: Tensor) -> Tensor:
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255
