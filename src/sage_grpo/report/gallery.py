"""The same prompt and noise side by side: base and every run, at every evaluation."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.inside import replacing
from sage_grpo.report.run_data import RunData
from sage_grpo.report.summary import base_key, parts

Place = Callable[[int, Path], str]
"""Number of the run and a clip's file -> what the page calls it."""


def gallery(runs: Sequence[RunData]) -> tuple[dict[str, Any], list[tuple[int, Path]]]:
    """Entries for the page, and the clips (number of the run, file) that they refer to by place.

    An entry has a prompt, a base per kind of base model, and for every run its evaluations in order. A base clip is the first
    run's that kept it: the others' are equal, being made from the same weights and noise.
    """
    names = parts(runs)
    files: list[tuple[int, Path]] = []
    numbers: dict[Path, int] = {}
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    bases = list(dict.fromkeys(base_key(run) for run in runs))

    def number(place: int, file: Path | None) -> int | None:
        if file is None:
            return None
        if file not in numbers:
            numbers[file] = len(files)
            files.append((place, file))
        return numbers[file]

    for place, run in enumerate(runs):
        for iteration, clips in run.clips.items():
            for clip in clips:
                fresh: dict[str, Any] = {
                    "prompt": clip.prompt,
                    "noise": clip.noise,
                    "base": [None] * len(bases),
                    "runs": [[] for _ in runs],
                }
                entry = entries.setdefault(clip.key, fresh)
                scores = [clip.scores.get(name) for name in names]
                base = bases.index(base_key(run))
                if iteration > 0:
                    entry["runs"][place].append([iteration, number(place, clip.file), scores])
                elif entry["base"][base] is None or entry["base"][base][1] is None:
                    entry["base"][base] = [0, number(place, clip.file), scores]
    size = next((run.size for run in runs if run.size), {"width": 1, "height": 1, "frames": 0, "fps": 8})
    shown = [entry for entry in entries.values() if _has_clip(entry)]
    return {
        "parts": names,
        "bases": [[place for place, run in enumerate(runs) if base_key(run) == base] for base in bases],
        "iterations": sorted({iteration for run in runs for iteration in run.clips if iteration > 0}),
        "size": dict(size),
        "entries": shown,
        "without": len(entries) - len(shown),
    }, files


def inline(files: Sequence[tuple[int, Path]]) -> list[str]:
    """Clips as base64, for a page that holds them itself."""
    return [base64.b64encode(file.read_bytes()).decode("ascii") for _, file in files]


def beside(files: Sequence[tuple[int, Path]], folder: Path) -> list[str]:
    """Put clips into a folder beside the page, as links where the disk can, and say how the page finds them.

    What is there from an earlier report and is not needed any more goes; files of other names stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{place:02d}-{file.name}" for place, file in files]
    for name, (_, file) in zip(names, files):
        with replacing(folder / name) as fresh:
            try:
                fresh.unlink()
                os.link(file, fresh)  # videos are replaced whole and never written into
            except OSError:
                shutil.copyfile(file, fresh)
    for old in folder.glob("[0-9][0-9]-heldout-*.mp4"):
        if old.name not in names:
            old.unlink()
    return [f"{folder.name}/{name}" for name in names]


def _has_clip(entry: dict[str, Any]) -> bool:
    cells = [*entry["base"], *(cell for run in entry["runs"] for cell in run)]
    return any(cell is not None and cell[1] is not None for cell in cells)
