"""The interface between the pool and an engine (`machine.py`, `cluster.py`), and the process that makes the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from sage_grpo.utils.safe_io import alone

if TYPE_CHECKING:  # a node of a cluster holds a process, and needs none of these imports
    from sage_grpo.training.config import TrainConfig

COMMAND = (sys.executable, "-m", "sage_grpo.tools.compare.worker")


class PlaceLost(Exception):
    """The process or node of a run is lost, by no fault of the run: the run is made again elsewhere."""


class RunWorker(Protocol):
    """Makes one run after another; a thread of the pool waits for it."""

    def ready(self) -> bool:
        """Wait for room to make a run; False when the worker was closed before."""

    def answer(self, line: str) -> Iterator[Mapping[str, Any]]:
        """The messages of a job; the last is its {"row": ...}, or the reason why it has none, {"ended": sentence}. Raises `PlaceLost`."""

    def close(self, *, now: bool) -> None:
        """Take no more jobs; `now` also ends this one."""


class RunEngine(Protocol):
    """Makes runs somewhere."""

    def open(
        self, configs: Sequence[TrainConfig], out: Path, most: int | None
    ) -> AbstractContextManager[tuple[Sequence[RunWorker], str]]:
        """Workers for these runs while the context is open, at most `most` (None: as many as are useful), and a description of them. Logs go
        to `out`."""


class Process:
    """A worker that is a process of this machine."""

    def __init__(
        self, folder: Path, number: int, environment: Mapping[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        self.log = folder / "logs" / f"worker-{number:02d}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._environment, self._command = {**os.environ, **environment}, list(command)
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def ready(self) -> bool:
        """A process never waits."""
        return True

    def start(self) -> subprocess.Popen[str]:
        """The process, started if there is none or the last one ended."""
        if self._process is None or self._process.poll() is not None:
            with alone(self.log).open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    text=True,
                    bufsize=1,
                    start_new_session=True,  # Ctrl-C is for us: we end it, and its end is then no failure
                )
        if self._closed:  # between two looks of the thread
            self._process.kill()
        return self._process

    def answer(self, line: str) -> Iterator[Mapping[str, Any]]:
        """Its messages, to the row or to its end."""
        process = self.start()
        with suppress(BrokenPipeError):
            _of(process.stdin).write(line + "\n")
        for said in _of(process.stdout):
            words = json.loads(said)
            if "row" in words and words["row"]["status"] == "failed":  # it ends now; the next job needs another
                self._let_go(process)
            yield words
            if "row" in words:
                return
        yield {"ended": f"The process ended with {process.wait()}; {self.log} has its last words."}

    def close(self, *, now: bool) -> None:
        """Let the process end after its job, or at once."""
        self._closed = True
        if self._process is None:
            return
        if now:
            self._process.kill()
        self._let_go(self._process)

    def _let_go(self, process: subprocess.Popen[str]) -> None:
        """Close its input, and wait for its end."""
        with suppress(OSError):
            _of(process.stdin).close()
        process.wait()


def _of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
