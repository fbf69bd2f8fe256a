"""The process that makes runs, one after another, and its end in the pool.

`python -m sage_grpo.tools.compare.worker FD` receives requests on a connection with this file descriptor and answers {"done": iteration},
{"note": sentence} ... and {"row": ...}. Importing the libraries takes longer than a short run, so a process makes many. After a fault it ends,
because its state (a GPU's context above all) may be broken; the pool starts another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.utils.safe_io import alone

COMMAND = (sys.executable, "-m", "sage_grpo.tools.compare.worker")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to make."""

    job: CompareJob
    weights: Path | None
    """Folder for its final weights; None does not keep them."""
    unfinished: Path
    """Folder of its checkpoints while it is under way."""


def failed(job: CompareJob, reason: str) -> dict[str, Any]:
    return {**head(job, "failed", reason), "evaluations": {}, "passes": {}}


class Worker:
    """A process of this machine, started with its first run and again after a fault."""

    def __init__(
        self, folder: Path, number: int, environment: Mapping[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        self.log = folder / "logs" / f"worker-{number:02d}.log"
        self._environment, self._command = {**os.environ, **environment}, list(command)
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def begin(self, request: RunRequest) -> Connection:
        """Begin a run; returns the connection that becomes readable with every message."""
        self._running = self._running or self._start()
        connection = self._running[1]
        with suppress(BrokenPipeError):  # then its end is the next message
            connection.send(request)
        return connection

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = Pipe()
        with theirs, alone(self.log).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # it ends with us, see `_end_with_parent`
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us: we end it, and its end is then no failure
            )
        return process, ours

    def receive(self) -> Mapping[str, Any]:
        """The next message; {"ended": sentence} of a process that ended before its row."""
        assert self._running is not None
        try:
            message: Mapping[str, Any] = self._running[1].recv()
        except (EOFError, ConnectionResetError):
            return {"ended": f"The process ended with {self.close()}; {self.log} has its last words."}
        if "row" in message and message["row"]["status"] == "failed":
            self.close()
        return message

    def close(self, *, now: bool = False) -> int | None:
        """End the process, after its run or at once; its exit status."""
        if self._running is None:
            return None
        process, connection = self._running
        self._running = None
        if now:
            process.kill()
        connection.close()
        with process:  # closes its stdin
            return process.wait()


def _end_with_parent() -> None:
    """Exit at once when stdin ends: the parent is gone, and its next call resumes this very run."""
    os.read(0, 1)
    os._exit(1)


def main(descriptor: int) -> int:
    """Make runs until the connection closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from sage_grpo.tools.compare.measure import measure

    warnings.simplefilter("once")
    torch.set_num_threads(1)
    bases: dict[str, Any] = {}
    with Connection(descriptor) as pool, suppress(EOFError):
        while True:
            request: RunRequest = pool.recv()
            print(f"--- {request.job.name}", file=sys.stderr, flush=True)
            try:
                row = measure(
                    request.job,
                    bases,
                    lambda done: pool.send({"done": done}),
                    request.weights,
                    request.unfinished,
                    lambda text: pool.send({"note": text}),
                )
            except Exception as error:  # noqa: BLE001 - one run's fault is recorded, the others go on
                traceback.print_exc()
                pool.send({"row": failed(request.job, f"{type(error).__name__}: {error}")})
                return 1
            pool.send({"row": row})
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
