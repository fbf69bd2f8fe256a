"""Scores generated clips, or video files of any model, with any rewards."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.prompts import Prompt, load_prompts
from sage_grpo.rewards.base import TRIED, CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.inputs import check_routes
from sage_grpo.training.scoring import metadata_of
from sage_grpo.types import Sound
from sage_grpo.utils.json_schema import finite
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import spreadsheet_cell
from sage_grpo.utils.video import read_sound, read_video

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif")


@dataclass
class ScoredVideo:
    """One row of the table."""

    video: str  # path relative to the folder
    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)  # the other columns of its prompt's row
    fps: float = math.nan
    frames: int = 0
    height: int = 0
    width: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    """Every part, and `total` if weights were given; NaN if it could not be scored."""
    reason: str = ""  # reason for a missing score, or a reward's remark
    rewards: tuple[str, ...] = ()  # the rewards that its prompt names


def find_videos(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    videos = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not videos:
        raise ValueError(f"{folder} holds no video ({', '.join(SUFFIXES)}).")
    return videos


def read_prompts(path: Path, names: Sequence[str]) -> list[Prompt]:
    """The prompt of every video.

    A .txt file has one a line, in the order of the sorted names. Rows of the other prompt files name their video, with or without its suffix, in the
    column video, or as the key of a JSON object. Other columns are metadata for rewards.
    """
    prompts = load_prompts(path)
    if path.suffix == ".txt":
        if len(prompts) != len(names):
            raise ValueError(f"{path} has {len(prompts)} prompts for {len(names)} videos; name them in a .csv instead.")
        return prompts
    table: dict[str, Prompt] = {}
    for prompt in prompts:
        metadata = dict(prompt.metadata)
        video = str(metadata.pop("video" if "video" in metadata else "id", ""))
        if not video or video in table:
            fault = f"{video} has two rows: keep one of them" if video else "every row needs video and prompt"
            raise ValueError(f"{path}, {prompt.text[:60]!r}: {fault}.")
        table[video] = replace(prompt, metadata=metadata)
    found: list[Prompt | None] = []
    for name in names:
        keys = (name, str(Path(name).with_suffix("")), Path(name).name, Path(name).stem)
        found.append(next((table[key] for key in keys if key in table), None))
    missing = [name for name, prompt in zip(names, found) if prompt is None]
    if missing:
        raise ValueError(f"{path} has no prompt for {len(missing)} of {len(names)} videos: {', '.join(missing[:5])}.")
    return [prompt for prompt in found if prompt is not None]


def judge(rewards: Sequence[RewardSpec], rows: Sequence[ScoredVideo], device: str | torch.device) -> CompositeReward:
    """Build the rewards of videos, tried out on the first one's prompt; every row gets its score columns."""
    composite = CompositeReward(rewards, device=device, require_weights=False)
    composite.refuse_comparing("clips are scored one by one. Leave it out here.")
    others = [(row.prompt, row.metadata) for row in rows[1:TRIED]]
    routes = [row.rewards for row in rows[:TRIED]]
    problem = composite.try_out(rows[0].prompt, metadata=rows[0].metadata, others=others, routes=routes)
    if problem:
        raise RewardConfigError(problem)
    for row in rows:
        row.scores = dict.fromkeys([*composite.names, *(["total"] if composite.weights else [])], math.nan)
    return composite


def score_videos(
    videos: Path,
    prompts: Path,
    rewards: Sequence[RewardSpec],
    *,
    output: Path | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 8,
) -> list[ScoredVideo]:
    """Score every video of a folder, and write scores.csv and scores.json into `output`.

    A file that cannot be read or scored is a row with a reason; it does not score 0 or end the run.
    """
    paths = find_videos(videos)
    names = [path.relative_to(videos).as_posix() for path in paths]
    shown = read_prompts(prompts, names)
    check_routes(rewards, shown)
    rows = [ScoredVideo(name, one.text, metadata_of(one), rewards=one.rewards) for name, one in zip(names, shown)]
    composite = judge(rewards, rows, device)
    for batch, clips in _batches(paths, rows, 1 if composite.hears else batch_size):  # sounds differ in length
        sound = read_sound(videos / batch[0].video) if composite.hears else None
        score_clips(composite, batch, clips, None if sound is None else Sound(sound.waves[None], sound.rate))
    if output is not None:
        write_scores(output, rows)
    return rows


def refuse_unscored(videos: Path, rows: Sequence[ScoredVideo]) -> None:
    if all(math.isnan(score) for row in rows for score in row.scores.values()):
        raise ValueError(
            f"None of the {len(rows)} videos in {videos} could be scored. {rows[0].video}: {rows[0].reason}"
        )


def _batches(
    paths: Sequence[Path], rows: Sequence[ScoredVideo], size: int
) -> Iterator[tuple[list[ScoredVideo], Tensor]]:
    import av

    waiting: list[ScoredVideo] = []
    clips: list[Tensor] = []
    for path, row in zip(paths, rows):
        try:
            clip, row.fps = read_video(path)
        except (av.FFmpegError, OSError, ValueError) as error:
            row.reason = f"cannot be read: {error}"
            continue
        if waiting and (clips[0].shape != clip.shape or waiting[0].fps != row.fps or len(waiting) >= size):
            yield waiting, torch.stack(clips)
            waiting, clips = [], []
        waiting.append(row)
        clips.append(clip)
    if waiting:
        yield waiting, torch.stack(clips)


def score_clips(composite: CompositeReward, rows: Sequence[ScoredVideo], clips: Tensor, sound: Sound | None) -> None:
    """Write the scores and the size of clips, uint8 B x F x H x W x 3 of one frame rate, into their rows."""
    silent = composite.hears and sound is None
    for row in rows:
        row.frames, row.height, row.width = clips.shape[1:4]
        row.reason = "it has no sound, and a reward listens" if silent else ""
    if silent:
        return
    texts, metadata = [row.prompt for row in rows], [row.metadata for row in rows]
    routes = [row.rewards for row in rows]
    scores, report = composite.score(clips, texts, rows[0].fps, metadata=metadata, sound=sound, routes=routes)
    for index, row in enumerate(rows):
        row.scores.update({part: value[index].item() for part, value in scores.parts.items()})
        if "total" in row.scores:
            row.scores["total"] = scores.total[index].item()
        remarks = [one for one in (*report.failures, *report.remarks) if one.index == index]
        row.reason = "; ".join(f"{one.reward}: {one.reason}" for one in remarks)


def best_and_worst(rows: Sequence[ScoredVideo]) -> list[dict[str, Any]]:
    """A row of data.clips for every prompt: the video with the highest total is preferred to that with the lowest.
    Prompts with equal totals have none."""
    prompts: dict[str, list[ScoredVideo]] = {}
    for row in rows:
        if math.isfinite(row.scores["total"]):
            prompts.setdefault(row.prompt, []).append(row)
    pairs = []
    for clips in prompts.values():
        win, lose = (pick(clips, key=lambda row: row.scores["total"]) for pick in (max, min))
        if win.scores["total"] > lose.scores["total"]:
            pairs.append({**win.metadata, "prompt": win.prompt, "win": win.video, "lose": lose.video})
    return pairs


def summarize(rows: Sequence[ScoredVideo], column: str) -> dict[str, float]:
    values = [row.scores[column] for row in rows if math.isfinite(row.scores[column])]
    count = len(values)
    error = stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return {"mean": fmean(values) if count else math.nan, "standard_error": error, "count": count}


def summary(rows: Sequence[ScoredVideo]) -> dict[str, dict[str, float | None]]:
    columns = rows[0].scores if rows else {}
    return finite({column: summarize(rows, column) for column in columns})


def write_scores(folder: Path, rows: Sequence[ScoredVideo]) -> None:
    columns = list(rows[0].scores)
    facts = ("video", "prompt", "fps", "frames", "height", "width")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*facts, *map(spreadsheet_cell, columns), "reason"])
    for row in rows:
        scores = ["" if math.isnan(row.scores[column]) else repr(row.scores[column]) for column in columns]
        video, prompt, reason = (spreadsheet_cell(text) for text in (row.video, row.prompt, row.reason))
        writer.writerow([video, prompt, row.fps, row.frames, row.height, row.width, *scores, reason])
    records = [
        {fact: getattr(row, fact) for fact in facts} | {"scores": row.scores, "reason": row.reason} for row in rows
    ]
    document = json.dumps(finite({"summary": summary(rows), "videos": records}), indent=2, allow_nan=False) + "\n"
    replace_text(folder / "scores.csv", table.getvalue())
    replace_text(folder / "scores.json", document)
