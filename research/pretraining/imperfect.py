"""Deliberately imperfect training data: jittered motion, blur and noise on rendered clips. Wrong words are each world's own.

A model that learns this data well is good but not perfect, in known ways, and leaves RL something to improve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from research.pretraining.options import Flaws
from sage_grpo.worlds.shapes.render import to_uint8

ROUGH = Flaws(jitter_share=0.5, jitter=0.2, blur_share=0.4, blur=1.5, noise_share=0.3, noise=0.08)
"""Flaws of what a VAE learns on: stronger than those of the flow's data."""
NONE = Flaws(wrong_word=0, jitter_share=0, blur_share=0, noise_share=0)
"""Clean clips."""


def jitter(strength: Tensor, frames: int, generator: torch.Generator) -> Tensor:
    """Displacements n x frames x 2 for `render`, independent in every frame and axis.

    `strength` (n) is their standard deviation in world units; one world unit is half the shorter side, so
    0.0625 is one pixel in a frame of 32.
    """
    return torch.randn(len(strength), frames, 2, generator=generator) * strength[:, None, None]


def blur(videos: Tensor, strength: Tensor) -> Tensor:
    """Gaussian blur of each clip with a standard deviation of `strength` pixels; the border is repeated outwards."""
    sigma = strength.clamp_min(1e-3)[:, None]
    reach = int(3 * float(sigma.max()) + 0.999)
    taps = torch.arange(-reach, reach + 1, device=videos.device)
    kernel = torch.exp(-0.5 * (taps / sigma).square())
    kernel = kernel * (taps.abs() <= 3 * sigma)  # so a clip's blur does not depend on its neighbors
    kernel = kernel / kernel.sum(1, keepdim=True)
    for axis in (2, 3):
        at = torch.arange(videos.shape[axis], device=videos.device)
        shifted = (
            videos.index_select(axis, (at + tap).clamp(0, len(at) - 1)) * weight[:, None, None, None, None]
            for tap, weight in zip(taps, kernel.T)
        )
        videos = sum(shifted, torch.zeros_like(videos))
    return videos


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Clips of a world for training, uint8 n x F x H x W x 3."""

    random_scenes: Callable[..., Any]
    """The world's: (n, generator, split) to a batch of scenes."""
    render: Callable[..., Tensor]
    """The world's: (batch, frames, height, width, displacement) to clean pictures in [0, 1]."""
    frames: int
    """Frames of a clip."""
    side: int
    """Height and width of a clip."""
    rough: Flaws = ROUGH
    """Flaws of half the clips that the VAE learns on."""

    def imperfect(self, batch: Any, flaws: Flaws, generator: torch.Generator, device: torch.device) -> Tensor:
        """Clips of these scenes with the flaws of the data, on the device."""
        n, side = len(batch), self.side

        def strengths(share: float, most: float) -> Tensor:
            hit = torch.rand(n, generator=generator) < share
            return hit * most * (0.3 + 0.7 * torch.rand(n, generator=generator))

        displacement = jitter(strengths(flaws.jitter_share, flaws.jitter), self.frames, generator)
        blurs = strengths(flaws.blur_share, flaws.blur)
        noises = strengths(flaws.noise_share, flaws.noise).to(device)
        videos = self.render(batch.to(device), self.frames, side, side, displacement=displacement.to(device))
        hit = (blurs > 0).nonzero().squeeze(1)
        if len(hit):
            videos[hit.to(device)] = blur(videos[hit.to(device)], blurs[hit].to(device))
        # On a GPU the noise is drawn there: a host generator would take longer than everything else together.
        drawn = torch.randn(videos.shape, device=device)
        return to_uint8(videos + drawn * noises[:, None, None, None, None])

    def for_decoder(self, n: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Clips for the VAE: half clean, the rest spoilt more than the flow's data, some with two clips in one.

        RL explores outside the data; a decoder that has seen such clips shows them as they are.
        """
        clean = n // 2
        scenes = self.random_scenes(n, generator, split="train")
        videos = torch.cat(
            [
                self.imperfect(scenes[:clean], NONE, generator, device),
                self.imperfect(scenes[clean:], self.rough, generator, device),
            ]
        )
        blend = n // 20  # two clips laid over one another: faint and double objects
        if blend:
            weight = torch.rand(blend, 1, 1, 1, 1, device=device)
            videos[-blend:] = torch.lerp(videos[-blend:].float(), videos[:blend].float(), weight).to(torch.uint8)
        return videos

    def clean(self, n: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Perfect clips of combinations that no training has seen."""
        scenes = self.random_scenes(n, generator, split="heldout").to(device)
        return to_uint8(self.render(scenes, self.frames, self.side, self.side))
