"""One variant on one model in one process: `python unit.py OPTIONS`, JSON that run.py writes. Adds one line to the output."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import stubs
from job import Job
from meter import Line
from variants import VARIANTS


def run(options: dict[str, Any]) -> None:
    """Measure; the line is written also when it fails."""
    job = Job(**options["job"])
    line = Line(
        Path(options["out"]),
        model=options["model"],
        variant=options["variant"],
        tiny=options["tiny"],
        job=options["job"],
        commits=options["commits"],
    )
    with line.written() as content:
        content["stand_ins"] = stubs.install()
        variant = VARIANTS[options["variant"]]
        framework = importlib.import_module(variant.framework)
        framework.run(content, job, {**options, "settings": variant.settings}, line.note)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
