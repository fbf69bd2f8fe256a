"""Given clips as latents: brought into the run's format, encoded once by the model's VAE, and kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.data.examples import list_of
from sage_grpo.data.prompts import Prompt
from sage_grpo.inside import replace_text
from sage_grpo.models.base import VelocityModel, encodes_clips
from sage_grpo.models.checkpoints.cache import EncodingCache
from sage_grpo.types import VideoSpec
from sage_grpo.video import fitted, frames_at, read_video, video_length

LATENTS, CARD = "latents", "examples.json"
"""In the run's folder: what is encoded, and what was learned from."""
NAMED = 3
"""Rows that are left out are named up to here in a message; the card has all."""


@dataclass(frozen=True)
class Examples:
    """The rows of data.clips that a run learns from."""

    source: Path
    """The list."""
    prompts: Sequence[Prompt]
    """Rows that are used."""
    skipped: Sequence[tuple[str, str]] = ()
    """Rows that are left out: their prompts, and why."""

    @property
    def summary(self) -> str:
        """A sentence for the terminal."""
        clips = sum(len(prompt.clips) for prompt in self.prompts)
        named = "; ".join(why for _, why in self.skipped[:NAMED]) + ("; ..." if len(self.skipped) > NAMED else "")
        left = f"; {len(self.skipped)} rows are left out ({named})" if self.skipped else ""
        return f"{self.source}: {len(self.prompts)} rows with {clips} clips{left}."

    def card(self, video: VideoSpec) -> dict[str, Any]:
        """What was used, as plain data."""
        files = dict.fromkeys(file for prompt in self.prompts for file in prompt.clips)
        return {
            "file": str(self.source),
            "sha256": _sha256(self.source),
            "rows": len(self.prompts),
            "clips": {str(file): _sha256(file) for file in files},
            "skipped": [{"prompt": prompt, "why": why} for prompt, why in self.skipped],
            "format": asdict(video),
        }

    def write_card(self, out: Path, video: VideoSpec) -> None:
        """The card, into the run's folder."""
        replace_text(out / CARD, json.dumps(self.card(video), indent=2, ensure_ascii=False))


def usable(source: str, prompts: Sequence[Prompt], video: VideoSpec) -> Examples:
    """The rows whose clips can be read and are long enough for the run's format; ValueError where there is none. Only headers are read."""
    used, skipped = [], []
    for prompt in prompts:
        why = next(filter(None, (_fault(file, video) for file in prompt.clips)), "")
        if why:
            skipped.append((prompt.text, why))
        else:
            used.append(prompt)
    found = Examples(list_of(source), used, skipped)
    if not used:
        raise ValueError(
            f"data.clips: none of the {len(prompts)} rows can be used. {found.summary} Use fewer frames (model.frames) or a lower model.fps."
        )
    return found


def _fault(file: Path, video: VideoSpec) -> str:
    """Why a clip cannot be used; empty where it can."""
    try:
        frames, fps = video_length(file)
    except ValueError as error:
        return str(error)
    needed = frames_at(fps, video)[-1] + 1
    if frames >= needed:
        return ""
    return f"{file} is too short: {frames} frames at {fps:g} fps, {video.frames} at {video.fps:g} fps take {needed}"


class Encoder:
    """Latents of clips by their files. What was encoded is found again by the content of the file, the format and the VAE."""

    def __init__(self, model: VelocityModel, folder: Path, placed: Callable[[], AbstractContextManager[None]]) -> None:
        """placed: inside, the VAE is where the model computes."""
        self.video, self.model, self.placed = model.video, encodes_clips(model), placed
        self._cache = EncodingCache(folder, self.model.latents_key(), "Encoded clips")

    def __call__(self, file: Path) -> Tensor:
        """One clip's latents, on the CPU."""
        return self._cache.get((_sha256(file), str(self.video)), lambda: {"latents": self._encode(file)})["latents"]

    def _encode(self, file: Path) -> Tensor:
        clip, fps = read_video(file)
        try:
            clip = fitted(clip, fps, self.video)
        except ValueError as error:  # the header promised more
            raise ValueError(f"{file} is {error}. Take its row out of data.clips.") from error
        with self.placed():
            return self.model.to_latents(clip[None])[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
