"""Ways to spoil a clip by a known amount: for imperfect pretraining data and for testing the judge.

Every `strength` is a float or a tensor of B values; zero leaves the clip as it is. A generator may
live on another device than the clips.
"""

from __future__ import annotations

import torch
from torch import Tensor

Strength = float | Tensor


def jitter(n: int, frames: int, strength: Strength, generator: torch.Generator | None = None) -> Tensor:
    """Displacements n x frames x 2 for `render`, independent in every frame and axis.

    `strength` is their standard deviation in world units; one world unit is half the shorter side, so
    0.0625 is one pixel in a frame of 32.
    """
    return _normal((n, frames, 2), generator).to(_column(strength, 3).device) * _column(strength, 3)


def noise(videos: Tensor, strength: Strength, generator: torch.Generator | None = None) -> Tensor:
    """Add white noise of this standard deviation; strength 0.03 is 30 dB."""
    drawn = _normal(videos.shape, generator).to(videos.device)
    return (videos + drawn * _column(strength, 5, videos.device)).clamp(0, 1)


def flicker(videos: Tensor, strength: Strength, generator: torch.Generator | None = None) -> Tensor:
    """Multiply every frame by its own brightness, 1 + strength * standard normal."""
    drawn = _normal((*videos.shape[:2], 1, 1, 1), generator).to(videos.device)
    return (videos * (1 + drawn * _column(strength, 5, videos.device))).clamp(0, 1)


def blur(videos: Tensor, strength: Strength) -> Tensor:
    """Gaussian blur with a standard deviation of `strength` pixels; the border is repeated outwards."""
    sigma = _column(strength, 1, videos.device).expand(len(videos)).clamp_min(1e-3)
    reach = max(1, int(3 * float(sigma.max()) + 0.999)) if len(videos) else 1
    taps = torch.arange(-reach, reach + 1, device=videos.device)
    kernel = torch.exp(-0.5 * (taps / sigma[:, None]).square())
    kernel = kernel * (taps.abs() <= 3 * sigma[:, None])  # so a clip's blur does not depend on its neighbours
    kernel = kernel / kernel.sum(1, keepdim=True)
    for axis in (2, 3):
        videos = _convolve(videos, kernel, axis)
    return videos


def _convolve(videos: Tensor, kernel: Tensor, axis: int) -> Tensor:
    size, reach = videos.shape[axis], kernel.shape[1] // 2
    at = torch.arange(size, device=videos.device)
    shifted = (
        videos.index_select(axis, (at + tap - reach).clamp(0, size - 1)) * kernel[:, tap, None, None, None, None]
        for tap in range(kernel.shape[1])
    )
    return sum(shifted, torch.zeros_like(videos))


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn where the generator lives."""
    device = "cpu" if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device)


def _column(strength: Strength, dims: int, device: torch.device | None = None) -> Tensor:
    value = torch.as_tensor(strength, dtype=torch.float32, device=device)
    return value.reshape(-1, *[1] * (dims - 1))
