"""Clips in the format of a run: which rows of a list of examples can be used, and what was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.examples import list_of
from sage_grpo.data.prompts import Prompt
from sage_grpo.inside import replace_text
from sage_grpo.types import VideoSpec
from sage_grpo.video import check_clip, video_length

CARD = "examples.json"
"""In the run's folder: what was learned from."""
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
            "sha256": content_hash(self.source),
            "rows": len(self.prompts),
            "clips": {str(file): content_hash(file) for file in files},
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
        why = next(filter(None, (fault_of(file, video) for file in prompt.clips)), "")
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


def fault_of(file: Path, video: VideoSpec) -> str:
    """Why a clip cannot be used; empty where it can."""
    try:
        frames, fps = video_length(file)
    except ValueError as error:
        return str(error)
    needed = frames_at(fps, video)[-1] + 1
    if frames >= needed:
        return ""
    return f"{file} is too short: {frames} frames at {fps:g} fps, {video.frames} at {video.fps:g} fps take {needed}"


def frames_at(fps: float, video: VideoSpec) -> list[int]:
    """The frames of a clip with this frame rate that a clip of a format consists of: from the first one on, in the format's own rhythm."""
    return [int(frame * fps / video.fps + 0.5) for frame in range(video.frames)]


def fitted(clip: Tensor, fps: float, video: VideoSpec) -> Tensor:
    """A clip in another format: its first frames in that rhythm, scaled until they cover the size, and cut at equal margins. A clip that has the
    format is returned as it is."""
    check_clip(clip)
    chosen = frames_at(fps, video)
    if chosen[-1] >= len(clip):
        raise ValueError(
            f"too short: {len(clip)} frames at {fps:g} fps, but {video.frames} at {video.fps:g} fps take {chosen[-1] + 1}"
        )
    clip, (height, width) = clip[chosen], (video.height, video.width)
    scale = max(height / clip.shape[1], width / clip.shape[2])
    size = max(height, round(clip.shape[1] * scale)), max(width, round(clip.shape[2] * scale))
    if size != tuple(clip.shape[1:3]):
        frames = clip.permute(0, 3, 1, 2).to(torch.float32)
        scaled = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True)
        clip = scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return clip[:, top : top + height, left : left + width].contiguous()


def content_hash(file: Path) -> str:
    """By which a file is known whatever its name."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
