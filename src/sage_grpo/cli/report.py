"""A page about one or several runs: scores with intervals, curves, settings, events, and clips side by side.

`sage-grpo report runs/a runs/b` writes report.html, which needs no network and no server; `sage-grpo report --watch runs/a` shows a run
that is still going on.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Annotated

from sage_grpo.config.ranges import NotNegative, Range, Seconds, checked


@checked
class Options:
    """Runs, and the place of the page."""

    runs: list[str] = field(default_factory=list)
    """Folders of runs; words without an option before them are such folders."""
    out: Path | None = None
    """The page; None is report.html in the folder of a single run, and in the current folder for several."""
    embed_megabytes: NotNegative = 12.0
    """Clips up to this size together are inside the page; more are put into a folder beside it (report_clips)."""
    watch: bool = False
    """Serve the page on this machine and keep it up to date while the run goes on; nothing is written."""
    port: Annotated[int, Range(0, 65535)] = 0
    """Port to serve on; 0 takes any that is free."""
    every: Seconds = 3.0
    """Seconds between updates of a watched page."""


def run(options: Options) -> int:
    """Write the page, or serve it until interrupted."""
    folders = [Path(folder) for folder in options.runs]
    if not folders:
        raise ValueError("Name the folder of a run, e.g. sage-grpo report runs/demo.")
    for folder in folders:  # before the libraries are imported
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {folder}.")
    from sage_grpo.tools.report.page import PAGE, write_report

    if options.watch:
        return _serve(options, folders)
    out = options.out or ((folders[0] if len(folders) == 1 else Path()) / PAGE)
    if out.is_dir():
        out = out / PAGE
    print(f"Report: {write_report(folders, out, embed_megabytes=options.embed_megabytes)}")
    return 0


def _serve(options: Options, folders: list[Path]) -> int:
    from sage_grpo.tools.report.watch import ReportServer

    if options.out is not None:
        raise ValueError("--watch serves the page and writes none: leave out --out, or --watch.")
    try:
        server = ReportServer(folders, port=options.port, every=options.every)
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"Nothing can listen on 127.0.0.1:{options.port} ({error}). Choose another --port.") from error
    with server, suppress(KeyboardInterrupt):
        print(f"Watching on {server.address}   (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0
