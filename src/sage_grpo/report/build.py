"""Write a report to disk: the page, its clips, and for a run that ends, clips before and after side by side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.inside import inside, replace_text
from sage_grpo.report import gallery
from sage_grpo.report.page import describe, render
from sage_grpo.report.pairs import write_pairs
from sage_grpo.report.run_data import RunData, read_run

EMBED_MEGABYTES = 12.0
"""Clips up to this size together are part of the page itself."""
PAGE = "report.html"
PAIRS = "before_after"
"""Folder of videos with base left and tuned right."""


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """All runs; a folder that is named twice is shown once."""
    unique = list({folder.resolve(): folder for folder in folders}.values())
    if not unique:
        raise ValueError("Name the folder of a run, e.g. sage-grpo report runs/demo.")
    return [read_run(folder) for folder in unique]


def write_report(folders: Sequence[Path], file: Path, *, embed_megabytes: float = EMBED_MEGABYTES) -> Path:
    """Write the page of some runs; many clips go into a folder beside it, NAME_clips."""
    data, clips = describe(read_runs(folders))
    if sum(clip.stat().st_size for _, clip in clips) <= embed_megabytes * 1e6:
        data["clips"] = {"kind": "inline", "list": gallery.inline(clips)}
    else:
        data["clips"] = {"kind": "files", "list": gallery.beside(clips, inside(file.parent, f"{file.stem}_clips"))}
    replace_text(file, render(data))
    return file


def leave_report(out: Path) -> str:
    """What a run leaves for people when it ends: the page, and a few videos with base left and tuned right; says where they are.

    A run of days does not fail for its report: what goes wrong is a warning.
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
