"""Decodes latents to clips, whole or only the frames that are read, with a graph for differentiated rewards; encodes
given clips to latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.examples import content_hash, fitted
from sage_grpo.health.statistics import frames_seen
from sage_grpo.models.base import VelocityModel, abilities, encoder_of, pixels_of
from sage_grpo.models.checkpoints.cache import EncodingCache
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.training.scoring import no_clips
from sage_grpo.types import VideoSpec
from sage_grpo.utils.video import read_video


def frames_needed(model: VelocityModel, reward: CompositeReward) -> list[int] | None:
    """Frames of a clip that a reward or the sentinel reads; None is all, also where the model cannot decode single
    frames.

    Empty where all rewards read latents: nothing is decoded for the sentinel alone.
    """
    if not reward.reads_clips:
        return []
    video = model.video
    read = reward.frames_read(video.frames, video.fps) if abilities(model).decode_frames else None
    return None if read is None else sorted({*read, *frames_seen(video.frames)})


CONTEXT = 2
"""Latent frames that are decoded before an excerpt, without a gradient, and cut off: a decoder treats the first frames
of a clip differently."""


def check_differentiable(model: VelocityModel, reward: CompositeReward, frames: int | None) -> None:
    """Refuse models that cannot decode with a graph, and excerpts that cannot be decoded or need not be; `frames` is
    the length of an excerpt."""
    if reward.learns_from_clips:
        pixels_of(model)
    if frames is not None and not reward.learns_from_clips:
        raise ValueError(
            f"objective.frames {frames}: every reward that counts reads latents, and nothing is decoded; leave it out."
        )
    if frames is not None and abilities(model).parts is not None:
        raise ValueError(
            f"objective.frames {frames}: clips of this model have several parts, and are decoded whole; leave it out."
        )
    if frames is not None and model.latent_shape()[1] == 1:
        raise ValueError(
            f"objective.frames {frames}: clips of this model are one latent frame, and have no excerpts; leave it out."
        )


def draw_excerpt(model: VelocityModel, frames: int | None, draw: Random) -> range | None:
    """A random range of neighbouring latent frames that make about this many frames; None is the whole clip."""
    if frames is None:
        return None
    whole = model.latent_shape()[1]
    count = max(1, min(whole, round(frames / _stride(model))))
    start = draw.randrange(whole - count + 1)
    return range(start, start + count)


def pixels_read(model: VelocityModel, reward: CompositeReward, latents: Tensor, excerpt: range | None = None) -> Tensor:
    """Latents to float clips with a graph, exact at the frames that counting rewards read.

    excerpt: latent frames that become a clip of their own, the only ones with a gradient.
    """
    if excerpt is None:
        read = reward.frames_read(model.video.frames, model.video.fps, counting=True)
        return pixels_of(model)(latents, read)
    first, stop = excerpt.start, excerpt.stop
    before, own = latents[:, :, max(0, first - CONTEXT) : first].detach(), latents[:, :, first:stop]
    skipped = 1 + _stride(model) * (before.shape[2] - 1) if first else 0
    count = 1 + _stride(model) * (before.shape[2] + own.shape[2] - 1) - skipped
    read = reward.frames_read(count, model.video.fps, counting=True)
    frames = None if read is None else [skipped + frame for frame in read]
    return pixels_of(model)(torch.cat([before, own], dim=2), frames)[:, skipped:]


def _stride(model: VelocityModel) -> int:
    """Frames of a clip that a latent frame after the first makes."""
    return max(1, (model.video.frames - 1) // max(1, model.latent_shape()[1] - 1))


class DecodedClips:
    """The clips of one process, decoded one micro-batch at a time; with `frames` only these are decoded, and all others
    are black."""

    def __init__(self, model: VelocityModel, frames: Sequence[int] | None, count: int) -> None:
        """count: clips of all micro-batches together."""
        self.model, self.frames, self.done = model, frames, 0
        self._whole: list[Tensor] = []
        self._sparse = None if frames is None else black_clips(count, model.video)

    def add(self, latents: Tensor) -> Tensor:
        """Decode a micro-batch and return its clips."""
        if self._sparse is None:
            self._whole.append(self.model.decode(latents))
            return self._whole[-1]
        clips = self._sparse[self.done : self.done + len(latents)]
        decode = abilities(self.model).decode_frames
        if self.frames and decode is not None:
            clips[:, list(self.frames)] = decode(latents, self.frames)
        self.done += len(latents)
        return clips

    @property
    def videos(self) -> Tensor:
        if self._sparse is not None:
            return self._sparse
        return torch.cat(self._whole) if self._whole else no_clips(self.model.video)


def black_clips(count: int, video: VideoSpec) -> Tensor:
    """Black clips to write frames into. Frames that are never written take no memory: NumPy allocates zeros lazily,
    PyTorch would write them."""
    return torch.from_numpy(np.zeros((count, video.frames, video.height, video.width, 3), dtype=np.uint8))


LATENTS = "latents"
"""Folder of a run's encoded clips."""


class Encoder:
    """Latents of clip files in the model's format, cached by content of the file, format and VAE."""

    def __init__(self, model: VelocityModel, folder: Path, placed: Callable[[], AbstractContextManager[None]]) -> None:
        """placed: context inside which the VAE is on the model's device."""
        self.model, self.placed = model, placed
        self._cache = EncodingCache(folder, encoder_of(model).key(), "Encoded clips")

    def __call__(self, file: Path) -> Tensor:
        """Latents of one clip on the CPU."""
        key = content_hash(file), str(self.model.video)
        return self._cache.get(key, lambda: {"latents": self._encode(file)})["latents"]

    def _encode(self, file: Path) -> Tensor:
        clip, fps = read_video(file)
        try:
            clip = fitted(clip, fps, self.model.video)
        except ValueError as error:  # the header promised more
            raise ValueError(f"{file} is {error}. Take its row out of data.clips.") from error
        with self.placed():
            return encoder_of(self.model).to_latents(clip[None])[0]
