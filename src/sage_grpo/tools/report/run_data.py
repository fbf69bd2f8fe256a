"""A run's folder as plain data for a page: curves, settings, events, noise, and the clips of every evaluation."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_grpo.callbacks.journal import read_events, read_rows
from sage_grpo.utils.json_schema import DocumentError, demand, is_number, read_json, shown
from sage_grpo.utils.redact import hide_inside
from sage_grpo.utils.safe_io import inside

MOST_POINTS = 1500  # points of a curve; of a longer run each point is the mean of several iterations
STEPWISE = ("gradient/raw/", "gradient/equalized/", "gradient/sent/")
"""Metrics that have one value per denoising step."""
READ = ("metrics.jsonl", "config.yaml", "events.jsonl", "schedule.json", ".finished", "videos")
"""Files read from a run's folder, which may be another user's: none may lead out of it."""


@dataclass(frozen=True)
class ReportClip:
    """One held-out clip of one evaluation."""

    prompt: str
    noise: str  # equal text is equal initial noise
    scores: Mapping[str, float | None]
    file: Path | None  # its video; None if it was not kept

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt, self.noise


@dataclass(frozen=True)
class RunData:
    """A run as its folder is now."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]  # one per iteration
    evaluations: Sequence[Mapping[str, Any]]  # one per evaluation
    clips: Mapping[int, Sequence[ReportClip]]  # by iteration
    size: Mapping[str, float]
    """Of its clips: width, height, frames, fps, and sound if they have one; empty if unknown."""
    events: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any] | None  # noise levels and exploring steps; None if the run did not write them
    finished: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # the configuration, flat

    def pairs(self, first: int, most: int) -> list[tuple[str, Path, Path]]:
        """(prompt, before, after) of clips of one prompt and noise that were kept at the evaluation `first` and at the last one."""
        if len(self.clips) < 2 or first not in self.clips:
            return []
        before = {clip.key: clip.file for clip in self.clips[first]}
        found = [(clip.prompt, before.get(clip.key), clip.file) for clip in self.clips[max(self.clips)]]
        return [(prompt, old, new) for prompt, old, new in found if old is not None and new is not None][:most]


def read_run(folder: Path) -> RunData:
    from sage_grpo.config.parsing import read_yaml

    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    for name in READ:
        inside(folder, name)
    rows = read_rows(folder / "metrics.jsonl")
    if not rows and not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder} has neither config.yaml nor metrics.jsonl: is it the folder of a run?")
    file = folder / "config.yaml"
    config = hide_inside(read_yaml(file)) if file.is_file() else {}
    clips, size = _clips(folder / "videos")
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        rows=[row for row in rows if "reward/total" in row or "loss/policy" in row],
        evaluations=[row for row in rows if "eval/total" in row],
        clips=clips,
        size=size,
        events=[*read_events(folder), *_masked(rows)],
        schedule=_json(folder / "schedule.json"),
        finished=(folder / ".finished").is_file(),
        settings=dict(flatten(config)),
    )


def flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys of a configuration with their values; lists of parts (rewards) by their index."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}[{place}]")
    else:
        yield prefix, value


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of a table with at most MOST_POINTS rows: `iteration`, `every` (rows per point) and one list per metric."""
    every = max(1, math.ceil(len(rows) / MOST_POINTS))
    groups = [rows[start : start + every] for start in range(0, len(rows), every)]
    names = sorted({name for row in rows for name in row if name != "iteration" and not name.startswith(STEPWISE)})
    return {
        "iteration": [group[-1]["iteration"] for group in groups],
        "every": every,
        "values": {name: [_mean(row.get(name) for row in group) for group in groups] for name in names},
    }


def stepwise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Norms of the gradient per denoising step: the mean over all iterations in which a step was trained."""
    kinds: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(STEPWISE) and value is not None:
                _, kind, step = name.split("/", 2)
                if step.isdecimal():
                    kinds.setdefault(kind, {}).setdefault(int(step), []).append(value)
    return {
        kind: [[step, sum(found) / len(found), min(found), max(found)] for step, found in sorted(steps.items())]
        for kind, steps in kinds.items()
    }


def noise_picture(run: RunData) -> dict[str, Any] | None:
    """The inspector's rows for the run's own kernel and schedule; None if they are not known."""
    if run.schedule is None or not isinstance(run.config.get("kernel"), dict):
        return None
    sigmas, stochastic = run.schedule.get("sigmas"), run.schedule.get("stochastic")
    if not isinstance(sigmas, list) or not all(map(is_number, sigmas)) or not isinstance(stochastic, list):
        return None
    import torch

    from sage_grpo.config.ranges import type_hints
    from sage_grpo.samplers.kernels import KernelSpec, find_kernel
    from sage_grpo.samplers.schedule import Schedule
    from sage_grpo.tools.inspect import inspect_kernel

    try:
        schedule, spec = Schedule(torch.tensor(sigmas), tuple(stochastic)), KernelSpec(**run.config["kernel"])
        if ":" in spec.name:
            return None  # custom code, which a report does not execute
        if "second" in type_hints(find_kernel(spec.name)) and run.schedule.get("offset"):
            return None  # a law that needs the second sigma of the run's own grid, which a group with another start does not have
        found = dataclasses.asdict(inspect_kernel(spec.build(schedule), schedule))
    except (KeyError, TypeError, ValueError):  # another version's run, or an edited file
        return None
    window = run.settings.get("rollout.window.kind", "all")
    return {**found, "moves": window in ("random", "sliding", "drawn")}


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(found) / len(found) if found else None


def _masked(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        for name in ("reward/failed", "eval/failed"):
            count = row.get(name) or 0
            if count > 0:
                where = "rollouts" if name.startswith("reward") else "held-out clips"
                text = f"{count:.0f} {where} had no reward and were left out."
                found.append({"time": None, "kind": "masked", "iteration": row["iteration"], "text": text})
    return found


def _clips(folder: Path) -> tuple[dict[int, list[ReportClip]], dict[str, float]]:
    """Clips by iteration, from the index of every evaluation; from the list of prompts if a run wrote no index."""
    clips: dict[int, list[ReportClip]] = {}
    size: dict[str, float] = {}
    found = sorted(folder.glob("heldout-*")) if folder.is_dir() else []
    # A run writes no links, and their targets are not the run's.
    links = [file for file in found if file.is_symlink()]
    if links:
        warnings.warn(f"{folder}: {len(links)} link(s) are not followed, such as {links[0].name}.", stacklevel=3)
    found = [file for file in found if file.is_file() and not file.is_symlink()]
    there = {file.name: file for file in found if file.suffix == ".mp4"}
    for file in (file for file in found if file.suffix == ".txt"):
        prompts = file.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [f"{file.stem}-{place:02d}.mp4" for place in range(len(prompts))]
        rows = [ReportClip(prompt, str(place), {}, there.get(names[place])) for place, prompt in enumerate(prompts)]
        clips[_iteration(file)] = rows
    for file in (file for file in found if file.suffix == ".json"):
        index = _json(file)
        if index is not None and isinstance(index.get("rows"), list):
            clips[_iteration(file)] = [_clip(row, file, there) for row in index["rows"]]
            demand(index, dict.fromkeys(("width", "height", "frames", "fps"), float), str(file))
            size = {name: index[name] for name in ("width", "height", "frames", "fps")}
            size |= {"sound": 1} if index.get("sound") is True else {}
    return {iteration: rows for iteration, rows in sorted(clips.items()) if iteration >= 0}, size


def _clip(row: Any, file: Path, there: Mapping[str, Path]) -> ReportClip:
    """A row of an index. The folder may be another user's: invalid rows are refused."""
    if not isinstance(row, dict):
        raise DocumentError(f"{file}: a row must be an object, got {shown(row)}.")
    demand(row, {"prompt": str, "noise": str | int, "scores": dict, "clip": str | None}, f"{file}: a row")
    demand(row["scores"], dict.fromkeys(row["scores"], float | None), f"{file}: scores")
    return ReportClip(row["prompt"], str(row["noise"]), row["scores"], there.get(row["clip"] or ""))


def _iteration(file: Path) -> int:
    number = file.stem.removeprefix("heldout-")
    return int(number) if number.isdecimal() else -1


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = read_json(file) if file.is_file() else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
