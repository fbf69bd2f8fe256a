"""Write a page about one or several runs: scores with intervals, curves, settings, events and clips side by side.

`sage-grpo report runs/a runs/b` writes report.html, which needs no network and no server; `--watch true` updates it during a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from sage_grpo.config.ranges import NotNegative, Seconds, checked


@checked
class Options:
    """Runs, and the page's location."""

    runs: list[str] = field(default_factory=list)
    """Folders of runs; words before all options are folders too."""
    out: Path | None = None
    """The page; None is report.html in the run's folder, or in the current folder for several runs."""
    embed_megabytes: NotNegative = 12.0
    """Embed clips in the page up to this total size in MB; beyond it they go to a folder beside it."""
    watch: bool = False
    """Rewrite the page whenever a run changes, until all have finished or Ctrl-C."""
    every: Seconds = 3.0
    """Seconds between checks, with watch."""


def run(options: Options) -> int:
    folders = [Path(folder) for folder in options.runs]
    if not folders:
        raise ValueError("Name the folder of a run, e.g. sage-grpo report runs/demo.")
    for folder in folders:  # before the libraries are imported
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {folder}.")
    from sage_grpo.tools.report.page import PAGE, write_report

    out = options.out or ((folders[0] if len(folders) == 1 else Path()) / PAGE)
    if out.is_dir():
        out = out / PAGE
    changed = _changed(folders)
    print(f"Report: {write_report(folders, out, embed_megabytes=options.embed_megabytes)}", flush=True)
    with suppress(KeyboardInterrupt):
        while options.watch and not all((folder / ".finished").is_file() for folder in folders):
            time.sleep(options.every)
            before, changed = changed, _changed(folders)
            if changed != before:
                write_report(folders, out, embed_megabytes=options.embed_megabytes)
    return 0


def _changed(folders: Iterable[Path]) -> list[int]:
    files = [folder / name for folder in folders for name in ("metrics.jsonl", "events.jsonl", ".finished")]
    return [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]
