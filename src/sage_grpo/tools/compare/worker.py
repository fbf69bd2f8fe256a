"""Processes that make runs side by side, one run after another: importing the libraries takes longer than a short run."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.utils.safe_io import alone

if TYPE_CHECKING:  # a worker sets its environment before it imports torch
    from sage_grpo.tools.compare.prepare import CompareJob

Row = dict[str, Any]


def serve(connection: Connection, log: Path, environment: Mapping[str, str], folder: Path, weights: bool) -> None:
    """The body of a worker process: it answers each job with {"note": sentence} ... and {"row": ...}, and ends after a fault, because its state
    (a GPU's context above all) may be broken. `folder` is the comparison's, absolute."""
    os.setsid()  # Ctrl-C is for the parent, which ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    with alone(log).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(environment)
    import torch

    from sage_grpo.tools.compare import store
    from sage_grpo.tools.compare.measure import measure

    warnings.simplefilter("once")
    torch.set_num_threads(1)
    bases: dict[str, Any] = {}
    with suppress(EOFError):
        while True:
            job: CompareJob = connection.recv()
            print(f"--- {job.name}", file=sys.stderr, flush=True)
            kept = folder / "weights" / f"{Path(job.file).stem}-{job.seed}" if weights else None
            try:
                unfinished = store.place(folder, job.key)
                row = measure(job, bases, kept, unfinished, lambda text: connection.send({"note": text}))
            except Exception as error:  # noqa: BLE001 - one run's fault is recorded, the others go on
                traceback.print_exc()
                connection.send({"row": failed(job, f"{type(error).__name__}: {error}")})
                return
            connection.send({"row": row})


def end_with_parent() -> None:
    """Exit at once when the parent is gone: its next call resumes this very run."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def failed(job: CompareJob, reason: str) -> Row:
    from sage_grpo.tools.compare.prepare import head

    return {**head(job, "failed", reason), "evaluations": {}, "passes": {}}


class Worker:
    """A process of this machine, started with its first run and again after a fault."""

    def __init__(
        self,
        folder: Path,
        number: int,
        environment: Mapping[str, str],
        weights: bool = False,
        body: Callable[..., None] = serve,
    ) -> None:
        self.log, self._body = folder / "logs" / f"worker-{number:02d}.log", body
        self._given = (self.log, environment, folder.absolute(), weights)
        self._process: Any = None

    def begin(self, job: CompareJob) -> Connection:
        """Begin a run; returns the connection that becomes readable with every message."""
        if self._process is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=self._body, args=(theirs, *self._given))
            self._process.start()
            theirs.close()
        self._job = job
        with suppress(BrokenPipeError):  # then its end is the next message
            self._connection.send(job)
        return self._connection

    def receive(self) -> Mapping[str, Any]:
        """The next message; a process that ended before its row has a failed one."""
        try:
            message: Mapping[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            fault = f"The process ended with {self._process.exitcode}; {self.log} has its last output."
            message = {"row": failed(self._job, fault)}
        if "row" in message and message["row"]["status"] == "failed":
            self.close()
        return message

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def make_all(
    jobs: Iterable[CompareJob],
    workers: Sequence[Worker],
    on_row: Callable[[CompareJob, Row], None],
    on_note: Callable[[CompareJob, str], None] = lambda job, text: None,
) -> None:
    """Make runs in order; `on_row` gets each row as it comes. An interruption or a fault ends the workers."""
    waiting, idle = deque(jobs), deque(workers)
    running: dict[Any, tuple[Worker, CompareJob]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                worker, job = idle.popleft(), waiting.popleft()
                running[worker.begin(job)] = worker, job
            for connection in wait(list(running)):
                worker, job = running[connection]
                message = worker.receive()
                if "note" in message:
                    on_note(job, message["note"])
                else:
                    del running[connection]
                    idle.append(worker)
                    on_row(job, message["row"])
    finally:
        for worker in workers:
            worker.close()
