"""A frame reward of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def redness(frames: Tensor, prompts: Sequence[str]) -> Tensor:
    """How red a frame is, in [-1, 1]; sees single frames."""
    levels = frames.float().mean(dim=(1, 2)) / 255
    return levels[:, 0] - levels[:, 1:].mean(dim=1)
