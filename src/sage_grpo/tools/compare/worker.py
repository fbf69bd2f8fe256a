"""A process that makes one run after another: `python -m sage_grpo.tools.compare.worker`, jobs as JSON lines on stdin, answers on stdout.

Importing the libraries takes longer than a short run, so a process makes many. After a fault it ends, because its state
(a GPU's context above all) may be broken; the pool starts another.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sage_grpo.run.identity import of_code, plain
from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.tools.compare.store import place
from sage_grpo.utils.safe_io import replace_text


def request(job: CompareJob, folder: Path, *, weights: bool) -> dict[str, Any]:
    """A job as a line for a worker; its configuration is a file."""
    words, folder = asdict(replace(job, config=None)), folder.absolute()  # type: ignore[arg-type]
    return {
        **words,
        "file": str(folder / "configs" / job.file),
        "weights": str(weights_of(job, folder)) if weights else None,
        "unfinished": str(place(folder, job.key)),
    }


def weights_of(job: CompareJob, folder: Path) -> Path:
    """Folder of the final weights of a run."""
    return folder / "weights" / f"{Path(job.file).stem}-{job.seed}"


def read(line: str) -> tuple[CompareJob, Path | None, Path | None]:
    """The job of a line, the folder of its weights, and the folder of its checkpoints; None: not kept."""
    from sage_grpo.config.parsing import parse
    from sage_grpo.training.config import TrainConfig

    words = json.loads(line)
    config = parse(TrainConfig, ["--config", words.pop("file")], prog="sage-grpo compare")
    weights, unfinished = (
        None if (name := words.pop(one)) is None else Path(name) for one in ("weights", "unfinished")
    )
    words |= {"config": replace(config, seed=words["seed"]), "points": tuple(words["points"])}
    return CompareJob(**words), weights, unfinished


def write_config(job: CompareJob, folder: Path) -> None:
    """The whole configuration of a job's arm, as `sage-grpo train --config` takes it."""
    import yaml

    file = folder / "configs" / job.file
    replace_text(file, yaml.safe_dump(plain(asdict(job.config)), sort_keys=False))


def jobs() -> Iterator[str]:
    """The lines of stdin. If stdin ends during a job, the parent is gone: exit at once, because the next parent resumes this very run."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    asked = answered = 0

    def listen() -> None:
        nonlocal asked
        with open(0, "rb", buffering=0, closefd=False) as stream:  # no buffer: its lock would outlive the interpreter
            for line in stream:
                asked += 1
                lines.put(line)
        if asked > answered:
            os._exit(1)
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while (line := lines.get()) is not None:
        yield line.decode()
        answered += 1


def main() -> int:
    """Answer jobs until there are no more: {"ready": digest of the code}, then per job {"done": iteration}, {"note": sentence} ... and {"row": ...}."""
    channel = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to the log

    def say(**words: Any) -> None:
        line = json.dumps(words).encode() + b"\n"
        while line:  # a pipe may take a part
            line = line[os.write(channel, line) :]

    import torch

    from sage_grpo.tools.compare.measure import measure

    warnings.simplefilter("once")
    torch.set_num_threads(1)
    bases: dict[str, Any] = {}
    say(ready=of_code())
    for line in jobs():
        job, weights, unfinished = read(line)
        print(f"--- {job.name}", file=sys.stderr, flush=True)
        try:
            row = measure(job, bases, lambda done: say(done=done), weights, unfinished, lambda text: say(note=text))
        except BrokenPipeError:  # the parent is gone
            return 1
        except Exception as error:  # noqa: BLE001 - one run's fault is recorded, the others go on
            traceback.print_exc()
            say(row={**head(job, "failed", f"{type(error).__name__}: {error}"), "evaluations": {}, "passes": {}})
            return 1
        say(row=row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
