"""A process that makes one run after another: `python -m sage_grpo.lab.worker`, jobs as JSON lines on stdin, answers on stdout.

The libraries take longer to import than a short run to finish, so a process makes many. After a fault it ends, because what it
holds (a GPU's context above all) may be broken; whoever started it starts another.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sage_grpo.lab.prepare import Job, head
from sage_grpo.train.folder.identity import plain


def request(job: Job, folder: Path, *, weights: bool) -> dict[str, Any]:
    """A job as a line for a worker; its configuration is a file."""
    words = asdict(replace(job, config=None))  # type: ignore[arg-type]
    place = folder / "weights" / f"{Path(job.file).stem}-{job.seed}"
    return {**words, "file": str(folder / "configs" / job.file), "weights": str(place) if weights else None}


def read(line: str) -> tuple[Job, Path | None]:
    """The job of a line, and where its weights go."""
    from sage_grpo.configure import parse
    from sage_grpo.train.config import TrainConfig

    words = json.loads(line)
    config = parse(TrainConfig, ["--config", words.pop("file")], prog="sage-grpo compare")
    weights = words.pop("weights")
    words |= {"config": replace(config, seed=words["seed"]), "points": tuple(words["points"])}
    return Job(**words), None if weights is None else Path(weights)


def write_config(job: Job, folder: Path) -> None:
    """The whole configuration of a job's arm, as `sage-grpo train --config` takes it."""
    import yaml

    from sage_grpo.lab.store import write

    file = folder / "configs" / job.file
    file.parent.mkdir(exist_ok=True)
    write(file, yaml.safe_dump(plain(asdict(job.config)), sort_keys=False).encode())


def main() -> int:
    """Answer jobs until there are no more: {"ready": true}, then per job {"done": iteration} ... and {"row": ...}."""
    channel = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the log

    def say(**words: Any) -> None:
        line = json.dumps(words).encode() + b"\n"
        while line:  # a pipe may take a part
            line = line[os.write(channel, line) :]

    import torch

    from sage_grpo.lab.measure import measure

    warnings.simplefilter("once")
    torch.set_num_threads(1)
    bases: dict[str, Any] = {}
    say(ready=True)
    for line in sys.stdin:
        job, weights = read(line)
        print(f"--- {job.name}", file=sys.stderr, flush=True)
        try:
            row = measure(job, bases, lambda done: say(done=done), weights)
        except BrokenPipeError:  # whoever asked is gone
            return 1
        except Exception as error:  # noqa: BLE001 - one run's fault is recorded, the others go on
            traceback.print_exc()
            say(row={**head(job, "failed", f"{type(error).__name__}: {error}"), "evaluations": {}, "passes": {}})
            return 1
        say(row=row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
