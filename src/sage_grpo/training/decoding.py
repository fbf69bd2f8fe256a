"""Decodes latents to clips, whole or only the frames that are read, with a graph for differentiated rewards; encodes
given clips to latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

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
    """Frames of a clip that a reward or the sentinel reads; None is all. Empty where all rewards read latents."""
    if not reward.reads_clips:
        return []
    video = model.video
    read = reward.frames_read(video.frames, video.fps) if abilities(model).decode_frames else None
    return None if read is None else sorted({*read, *frames_seen(video.frames)})


def pixels_read(model: VelocityModel, reward: CompositeReward, latents: Tensor) -> Tensor:
    """Latents to float clips with a graph, exact at the frames that counting rewards read."""
    return pixels_of(model)(latents, reward.frames_read(model.video.frames, model.video.fps, counting=True))


class DecodedClips:
    """The clips of one process, decoded one micro-batch at a time; with `frames` all others are black."""

    def __init__(self, model: VelocityModel, frames: Sequence[int] | None, count: int) -> None:
        """count: clips of all micro-batches together."""
        self.model, self.frames, self.done = model, frames, 0
        self._whole: list[Tensor] = []
        self._sparse = None if frames is None else black_clips(count, model.video)

    def add(self, latents: Tensor) -> Tensor:
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
