"""Clips to learn from in place of rollouts, in rows of a prompt with a better clip and a worse one, or with one clip; and clips brought into the
format of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.prompts import Prompt, prompt_of, rows_in
from sage_grpo.types import VideoSpec
from sage_grpo.utils.json_schema import shown
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.utils.video import check_clip, video_format

LISTS = ("pairs.jsonl", "clips.jsonl")  # file names of the list in a folder
COLUMNS = ("win", "lose", "clip")
NAMED = 3  # skipped rows that a message names


def list_of(source: str | Path) -> Path:
    place = Path(source).expanduser()
    if not place.is_dir():
        if place.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"data.clips {place}: listed in a .jsonl or .csv file, or in {LISTS[0]} of a folder.")
        return place
    lists = [place / name for name in LISTS if (place / name).is_file()]
    if len(lists) != 1:
        count = "both" if lists else "neither"
        raise ValueError(f"data.clips {place}: it has {count} of {' and '.join(LISTS)}; name the file that counts.")
    return lists[0]


def load_examples(source: str | Path, *, pairs: bool) -> list[Prompt]:
    """The rows of `data.clips` as prompts with their clips, two of each for `pairs`. Only the list is read here."""
    path = list_of(source)
    if not path.is_file():
        raise FileNotFoundError(f"data.clips: there is no file {path}.")
    examples = [_example(row, where, path.parent, pairs) for where, row in rows_in(path)]
    if not examples:
        raise ValueError(f"data.clips {path} has no row.")
    return examples


def _example(row: Mapping[str, Any], where: str, folder: Path, pairs: bool) -> Prompt:
    named = [name for name in COLUMNS if row.get(name)]
    if named not in (["win", "lose"], ["clip"]):
        near = next(filter(None, (did_you_mean(name, COLUMNS, 0.8) for name in row if name not in COLUMNS)), "")
        raise ValueError(f"{where}: a row has the columns win and lose, or clip; this one has {', '.join(row)}.{near}")
    if pairs and named == ["clip"]:
        raise ValueError(f"{where}: one clip, but objective.kind dpo learns from pairs: give win and lose, or use sft.")
    # Of a pair sft learns the better clip.
    clips = tuple(_file(row[name], name, where, folder) for name in (named if pairs else named[:1]))
    rest = {name: value for name, value in row.items() if name not in COLUMNS}
    return replace(prompt_of(rest, where, folder), clips=clips)


def _file(value: object, name: str, where: str, folder: Path) -> Path:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be the path of a clip, got {shown(value)}.")
    file = folder / value
    if not file.is_file():
        raise FileNotFoundError(f"{where}: there is no clip {file} (paths are relative to the list).")
    return file


@dataclass(frozen=True)
class Examples:
    """The rows of data.clips that a run learns from."""

    source: Path
    prompts: Sequence[Prompt]
    skipped: Sequence[tuple[str, str]] = ()  # skipped rows: their prompts, and the reasons

    @property
    def summary(self) -> str:
        clips = sum(len(prompt.clips) for prompt in self.prompts)
        reasons = "; ".join([why for _, why in self.skipped[:NAMED]] + ["..."] * (len(self.skipped) > NAMED))
        left = f"; {len(self.skipped)} rows are left out ({reasons})" if self.skipped else ""
        return f"{self.source}: {len(self.prompts)} rows with {clips} clips{left}."


def usable(source: str, prompts: Sequence[Prompt], video: VideoSpec) -> Examples:
    """The rows whose clips can be read and are long enough for a format; ValueError where there is none. Only headers are read."""
    faults = {prompt: next(filter(None, (fault_of(file, video) for file in prompt.clips)), "") for prompt in prompts}
    used, skipped = ([prompt for prompt in prompts if bool(faults[prompt]) == wrong] for wrong in (False, True))
    examples = Examples(list_of(source), used, [(prompt.text, faults[prompt]) for prompt in skipped])
    if not used:
        raise ValueError(
            f"data.clips: none of the {len(prompts)} rows can be used. {examples.summary} Use fewer frames (model.frames) or a lower model.fps."
        )
    return examples


def fault_of(file: Path, video: VideoSpec) -> str:
    try:
        clip = video_format(file)
    except ValueError as error:
        return str(error)
    fault = _shortness(clip.frames, clip.fps, video)
    return f"{file} is {fault}" if fault else ""


def _shortness(count: int, fps: float, video: VideoSpec) -> str:
    needed = frames_at(fps, video)[-1] + 1
    if count >= needed:
        return ""
    return f"too short: {count} frames at {fps:g} fps, {video.frames} at {video.fps:g} fps take {needed}"


def frames_at(fps: float, video: VideoSpec) -> list[int]:
    """The frames of a clip with this frame rate that make a clip of a format: from the first one on, at the format's frame rate."""
    return [int(frame * fps / video.fps + 0.5) for frame in range(video.frames)]


def fitted(clip: Tensor, fps: float, video: VideoSpec) -> Tensor:
    """A clip in another format: its first frames at that frame rate, scaled until they cover the size, and cut at equal margins. A clip that has the
    format is returned as it is."""
    check_clip(clip)
    if fault := _shortness(len(clip), fps, video):
        raise ValueError(fault)
    clip, (height, width) = clip[frames_at(fps, video)], (video.height, video.width)
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
