"""What workers of tests load by its import path."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sage_grpo.types import Sound

SECONDS = 0.2


def slow(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """Brightness, for which one has to wait: long enough to die meanwhile."""
    time.sleep(SECONDS)
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255


def smooth(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """How calm a clip is; it has a gradient."""
    return -(videos.float()[:, 1:] - videos.float()[:, :-1]).square().mean(dim=(1, 2, 3, 4)) / 255


def first_frame(frames: Tensor, prompts: Sequence[str]) -> Tensor:
    return frames.float().mean(dim=(1, 2, 3))


def known(latents: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    return latents[:, 0].float()


def better(first: Tensor, second: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    return (first.float().mean(dim=(1, 2, 3, 4)) > second.float().mean(dim=(1, 2, 3, 4))).float()


def loud(videos: Tensor, prompts: Sequence[str], fps: float, sound: Sound) -> Tensor:
    return sound.waves.mean(dim=(1, 2))


def picky(videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[Mapping[str, Any]]) -> Tensor:
    """Brightness, but it raises on clip 3."""
    if any(row["number"] == 3 for row in metadata):
        raise ValueError("this one not")
    return slow(videos, prompts, fps)
