"""A reward of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def redness(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """How red a clip is, in [-1, 1]."""
    levels = videos.float().mean(dim=(1, 2, 3)) / 255
    return levels[:, 0] - levels[:, 1:].mean(dim=1)
