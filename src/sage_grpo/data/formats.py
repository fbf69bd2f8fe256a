"""Clips in the format of a run: choice of the usable rows of a list of examples, and a record of them."""

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
from sage_grpo.types import VideoSpec
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.video import check_clip, video_format

CARD = "examples.json"
"""Record of the used examples, in the run's folder."""
NAMED = 3
"""Skipped rows that a message names; the card has all."""


@dataclass(frozen=True)
class Examples:
    """The rows of data.clips that a run learns from."""

    source: Path
    """The list."""
    prompts: Sequence[Prompt]
    """Rows that are used."""
    skipped: Sequence[tuple[str, str]] = ()
    """Skipped rows: their prompts, and the reasons."""
    shown: Sequence[float] = ()
    """The share of every clip that the run's format shows."""

    @property
    def summary(self) -> str:
        clips = sum(len(prompt.clips) for prompt in self.prompts)
        reasons = "; ".join([why for _, why in self.skipped[:NAMED]] + ["..."] * (len(self.skipped) > NAMED))
        left = f"; {len(self.skipped)} rows are left out ({reasons})" if self.skipped else ""
        return f"{self.source}: {len(self.prompts)} rows with {clips} clips{left}."

    def card(self, video: VideoSpec) -> dict[str, Any]:
        """The used examples as plain data."""
        files = dict.fromkeys(file for prompt in self.prompts for file in prompt.clips)
        return {
            "file": str(self.source),
            "sha256": content_hash(self.source),
            "rows": len(self.prompts),
            "clips": {str(file): content_hash(file) for file in files},
            "skipped": [{"prompt": prompt, "why": why} for prompt, why in self.skipped],
            "format": asdict(video),
            "formats": [
                {
                    **asdict(video),
                    "clips": len(self.shown),
                    "shown": sum(self.shown) / len(self.shown),
                    "least_shown": min(self.shown),
                }
            ],
        }

    def write_card(self, out: Path, video: VideoSpec) -> None:
        replace_text(out / CARD, json.dumps(self.card(video), indent=2, ensure_ascii=False))


def usable(source: str, prompts: Sequence[Prompt], video: VideoSpec) -> Examples:
    """The rows whose clips can be read and are long enough for a format. ValueError where there is none. Only headers are read."""
    used, skipped, shown = [], [], list[float]()
    for prompt in prompts:
        try:
            shares = [_share(file, video_format(file), video) for file in prompt.clips]
        except ValueError as error:
            skipped.append((prompt.text, str(error)))
            continue
        used.append(prompt)
        shown += shares
    examples = Examples(list_of(source), used, skipped, shown)
    if not used:
        raise ValueError(
            f"data.clips: none of the {len(prompts)} rows can be used. {examples.summary} Use fewer frames (model.frames) or a lower model.fps."
        )
    return examples


def _share(file: Path, clip: VideoSpec, video: VideoSpec) -> float:
    """The share of a clip that a format shows: of its length, times of its picture. ValueError where it is too short."""
    needed = frames_at(clip.fps, video)[-1] + 1
    if clip.frames < needed:
        raise ValueError(
            f"{file} is too short: {clip.frames} frames at {clip.fps:g} fps, {video.frames} at {video.fps:g} fps take {needed}"
        )
    aspect = clip.width * video.height / (clip.height * video.width)
    return round(needed / clip.frames * min(aspect, 1 / aspect), 6)


def fault_of(file: Path, video: VideoSpec) -> str:
    """The reason why a clip cannot be used in a format; empty if it can."""
    try:
        _share(file, video_format(file), video)
    except ValueError as error:
        return str(error)
    return ""


def frames_at(fps: float, video: VideoSpec) -> list[int]:
    """The frames of a clip with this frame rate that make a clip of a format: from the first one on, at the format's frame rate."""
    return [int(frame * fps / video.fps + 0.5) for frame in range(video.frames)]


def fitted(clip: Tensor, fps: float, video: VideoSpec) -> Tensor:
    """A clip in another format: its first frames at that frame rate, scaled until they cover the size, and cut at equal margins. A clip that has the
    format is returned as it is."""
    check_clip(clip)
    chosen = frames_at(fps, video)
    if chosen[-1] >= len(clip):
        raise ValueError(
            f"too short: {len(clip)} frames at {fps:g} fps, but {video.frames} at {video.fps:g} fps take {chosen[-1] + 1}"
        )
    clip, (height, width) = clip[chosen], (video.height, video.width)
    scale = max(height / clip.shape[1], width / clip.shape[2])
    size = round(clip.shape[1] * scale), round(clip.shape[2] * scale)
    if size != tuple(clip.shape[1:3]):
        frames = clip.permute(0, 3, 1, 2).to(torch.float32)
        scaled = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True)
        clip = scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return clip[:, top : top + height, left : left + width].contiguous()


def content_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
