"""The report as one HTML page: data, clips and assets together. No network, no code from data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sage_grpo.tools.report.picture import write_pairs
from sage_grpo.tools.report.run_data import RunData, noise_picture, read_run, series, stepwise
from sage_grpo.tools.report.summary import base_key, differences, parts, table, verdict
from sage_grpo.utils.json_schema import finite
from sage_grpo.utils.safe_io import inside, replace_text, replacing
from sage_grpo.version import __version__

SCRIPTS = ("base.js", "charts.js", "tables.js", "player.js", "gallery.js", "detail.js", "main.js")
"""In the order of their dependencies."""
EMBED_MEGABYTES = 12.0  # clips up to this size together are embedded in the page
PAGE, PAIRS = "report.html", "before_after"
"""Files of a finished run: its page, and the folder of videos with base left and tuned right."""


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    unique = list({folder.resolve(): folder for folder in folders}.values())
    if not unique:
        raise ValueError("Name the folder of a run, e.g. sage-grpo report runs/demo.")
    return [read_run(folder) for folder in unique]


def write_report(folders: Sequence[Path], file: Path, *, embed_megabytes: float = EMBED_MEGABYTES) -> Path:
    """Write the page of some runs; many clips go into a folder beside it, NAME_clips."""
    data, clips = describe(read_runs(folders))
    if sum(clip.stat().st_size for _, clip in clips) <= embed_megabytes * 1e6:
        embedded = [base64.b64encode(clip.read_bytes()).decode("ascii") for _, clip in clips]
        data["clips"] = {"kind": "inline", "list": embedded}
    else:
        data["clips"] = {"kind": "files", "list": beside(clips, inside(file.parent, f"{file.stem}_clips"))}
    replace_text(file, render(data))
    return file


def leave_report(out: Path) -> str:
    """Write the report of a run that ends: the page, and a few videos with base left and tuned right; returns their places in words.

    A run of days does not fail for its report: any error becomes a warning.
    """
    page, journal = out / PAGE, out / "metrics.jsonl"
    try:
        # A finished run that was started again has changed nothing.
        if not (page.is_file() and journal.is_file() and page.stat().st_mtime_ns >= journal.stat().st_mtime_ns):
            write_pairs(read_run(out), inside(out, PAIRS))
            write_report([out], page)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run is done and saved
        warnings.warn(
            f"The report of {out} could not be written ({type(error).__name__}: {error}). The run is not affected; "
            f"`sage-grpo report {out}` tries again.",
            stacklevel=2,
        )
        return ""
    pairs = f"   before and after: {out / PAIRS}" if any((out / PAIRS).glob("*.mp4")) else ""
    return f"Report: {page}{pairs}"


def describe(runs: Sequence[RunData]) -> tuple[dict[str, Any], list[tuple[int, Path]]]:
    """All data of a page but its clips, and the files of those."""
    shown, files = gallery(runs)
    titles = _distinct(runs)
    names = titles if len(runs) > 1 else ["tuned"]  # beside "base", as in its videos
    return {
        "title": ", ".join(titles),
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "clips": {"kind": "none", "list": []},
        "runs": [_run(run, name) for run, name in zip(runs, names)],
        "summary": table(runs),
        "verdict": [verdict(run, name if len(runs) > 1 else "") for run, name in zip(runs, names)],
        "differs": differences(runs) if len(runs) > 1 else [],
        "gallery": shown,
    }, files


def render(data: Mapping[str, Any]) -> str:
    script = "\n".join(f"// {name}\n{_asset(name)}" for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "media-src 'self' file: blob:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "POLICY": policy,
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _asset("style.css"),
        "DATA": as_script(data),
        "SCRIPT": script,
    }
    # In one pass over the template: values are never searched for placeholders.
    pieces = _asset("page.html").split("%%")
    return "".join(values[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def as_script(data: Any) -> str:
    """JSON that stays data inside a script element, whatever its strings contain."""
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _asset(name: str) -> str:
    return resources.files("sage_grpo.tools.report").joinpath("assets", name).read_text(encoding="utf-8")


def _run(run: RunData, name: str) -> dict[str, Any]:
    total = run.settings.get("iterations")
    return {
        "name": name,
        "iteration": run.rows[-1]["iteration"] if run.rows else 0,
        "iterations": total if isinstance(total, int) else None,
        "finished": run.finished,
        "hours": sum(row.get("time/total") or 0 for row in (*run.rows, *run.evaluations)) / 3600,
        "steps": series(run.rows),
        "evaluations": series(run.evaluations),
        "stepwise": stepwise(run.rows),
        "noise": noise_picture(run),
        "settings": run.settings,
        "events": sorted(run.events, key=lambda event: (event["iteration"], event["time"] or 0)),
    }


def _distinct(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(names)]


def gallery(runs: Sequence[RunData]) -> tuple[dict[str, Any], list[tuple[int, Path]]]:
    """Entries for the page, and the clips (index of the run, file) that they refer to by index.

    An entry has a prompt, a base per kind of base model, and for every run its evaluations in order. A base clip is the first
    run's that kept it: the others' are equal, with the same weights and noise.
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
                new: dict[str, Any] = {
                    "prompt": clip.prompt,
                    "noise": clip.noise,
                    "base": [None] * len(bases),
                    "runs": [[] for _ in runs],
                }
                entry = entries.setdefault(clip.key, new)
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


def beside(files: Sequence[tuple[int, Path]], folder: Path) -> list[str]:
    """Put clips into a folder beside the page, as links if the disk allows, and return their addresses for the page.

    Unused clips of an earlier report are deleted; files of other names stay.
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
