"""Clip formats: which one a model makes, and whether its VAE can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sage_grpo.models.spec import ModelError, ModelSpec
from sage_grpo.types import VideoSpec


def choose_video(spec: ModelSpec, checkpoint: Mapping[str, float], family: VideoSpec) -> VideoSpec:
    """The spec's format, else the checkpoint's, else the family's, field by field."""
    values = {
        name: first_given(getattr(spec, name), checkpoint.get(name), getattr(family, name))
        for name in ("frames", "height", "width", "fps")
    }
    return VideoSpec(**values)


def count_tokens(latents: tuple[int, ...], config: Any) -> int:
    """Video tokens that a transformer makes of latents (channels x frames x height x width)."""
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (config.patch_size_t, patch, patch)
    return math.prod(size // step for size, step in zip(latents[1:], patch))


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def check_video(video: VideoSpec, pipe: Any, patch: int | tuple[int, ...]) -> None:
    """Refuse sizes that the VAE or the transformer's patches cannot make, and name the nearest that they can."""
    temporal, spatial = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    multiple = spatial * (patch if isinstance(patch, int) else patch[-1])
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
