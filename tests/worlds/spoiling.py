"""Clean clips of a world with faults of a given strength."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Render = Callable[..., Tensor]


def spoil(kind: str, strength: float, render: Render, batch: Any, clean: Tensor) -> Tensor:
    """Clips with white noise of this standard deviation (0.03 is 30 dB), a blur of so many pixels, a brightness of every frame's own, or objects that
    are off their path by so much."""
    generator = torch.Generator().manual_seed(7)
    if kind == "jitter":
        way = strength * torch.randn(*clean.shape[:2], 2, generator=generator)
        return render(batch, *clean.shape[1:4], way)
    if kind == "blur":
        return blurred(clean, strength)
    shape = clean.shape if kind == "noise" else (*clean.shape[:2], 1, 1, 1)
    change = strength * torch.randn(shape, generator=generator)
    return (clean + change if kind == "noise" else clean * (1 + change)).clamp(0, 1)


def blurred(clips: Tensor, sigma: float) -> Tensor:
    """Gaussian blur; the border is repeated outwards."""
    taps = torch.arange(-6, 7)
    weights = torch.softmax(-0.5 * (taps / max(sigma, 1e-3)).square(), 0)
    for axis in (2, 3):
        at = torch.arange(clips.shape[axis])
        parts = [w * clips.index_select(axis, (at + tap).clamp(0, len(at) - 1)) for w, tap in zip(weights, taps)]
        clips = torch.stack(parts).sum(0)
    return clips
