"""One variant on one model in one process: `python unit.py OPTIONS`, JSON that run.py writes. Adds one line to the output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import stubs
from job import Job
from meter import Line


def run(options: dict[str, Any]) -> None:
    """Measure; the line is written also when it fails."""
    job = Job(**options["job"])
    line = Line(
        Path(options["out"]),
        model=options["model"],
        variant=options["variant"],
        tiny=options["tiny"],
        job=options["job"],
    )
    with line.written() as content:
        content["stand_ins"] = stubs.install()
        if options["variant"] == "stock":
            import stock as framework
        elif options["variant"] == "peer":
            import peer as framework
        else:
            import ours as framework
        framework.run(content, job, options, line.note)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
