"""Formats of clips and pictures: which one a model makes, and whether its VAE and its network can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.errors import ModelError
from sage_grpo.models.spec import ModelSpec
from sage_grpo.types import VideoSpec


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a VAE divides a clip into latents, and a network the latents into tokens."""

    channels: int
    """Channels of the latents."""
    temporal: int | None
    """Frames of a latent frame (the first frame has one of its own); None for a VAE of images."""
    spatial: int
    """Pixels of a latent, along height and width."""
    patch: tuple[int, int, int] = (1, 1, 1)
    """Latents of a token along frames, height and width."""
    sides: int = 1
    """What the pipeline asks height and width to be a multiple of, where that is more than VAE and network need."""

    def latents(self, video: VideoSpec) -> tuple[int, ...]:
        """Channels, frames, height and width of a clip's latents."""
        frames = 1 if self.temporal is None else (video.frames - 1) // self.temporal + 1
        return (self.channels, frames, video.height // self.spatial, video.width // self.spatial)

    def tokens(self, video: VideoSpec) -> int:
        """Tokens of a clip."""
        return math.prod(size // step for size, step in zip(self.latents(video)[1:], self.patch))

    def check(self, video: VideoSpec) -> None:
        """Refuse sizes that cannot be made, and name the nearest that can."""
        if self.temporal is None and video.frames != 1:
            raise ModelError(f"model.frames must be 1 for a model of images, got {video.frames}. Leave it out.")
        temporal, multiple = self.temporal or 1, math.lcm(self.spatial * self.patch[-1], self.sides)
        if (video.frames - 1) % temporal:
            below = (video.frames - 1) // temporal * temporal + 1
            raise ModelError(
                f"model.frames must be {temporal}k + 1 for this VAE, got {video.frames}: use {below} or {below + temporal}."
            )
        for name in ("height", "width"):
            value = getattr(video, name)
            if value % multiple:
                low = value // multiple * multiple
                nearest = " or ".join(str(n) for n in (low, low + multiple) if n)
                raise ModelError(f"model.{name} must be a multiple of {multiple} here, got {value}: use {nearest}.")


def choose_video(spec: ModelSpec, checkpoint: Mapping[str, float], family: VideoSpec) -> VideoSpec:
    """The spec's format, else the checkpoint's, else the family's, field by field."""
    values = {
        name: first_given(getattr(spec, name), checkpoint.get(name), getattr(family, name))
        for name in ("frames", "height", "width", "fps")
    }
    return VideoSpec(**values)


def check_image(image: Tensor | None, *, needed: bool, taken: bool) -> None:
    """Refuse a picture that the model has no use for or cannot read, and none where it needs one."""
    if image is None:
        if needed:
            raise ModelError("This is an image-to-video model: encode(prompts, images) needs one image per prompt.")
        return
    if not taken:
        raise ModelError("This model starts from text: leave the images out, or load an image-to-video checkpoint.")
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        raise ModelError(f"An image is uint8 H x W x 3, got {image.dtype} of shape {tuple(image.shape)}.")


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
