"""Writes metrics to TensorBoard by default, and to Weights & Biases on request.

These are views of the journal: a failure is a warning, and the run continues.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from sage_grpo.callbacks.journal import Journal
from sage_grpo.training.config import LogConfig
from sage_grpo.utils.imports import import_object
from sage_grpo.utils.safe_io import inside, replace_text

RUN_ID = ".run_id"
"""File in a run's folder with its id at W&B."""
LONGEST_ID = 128  # that W&B accepts
FAILURES = 5
"""Consecutive failures of a logger after which it is no longer used."""


@dataclass(frozen=True)
class ShownClips:
    """Videos to show: uint8 pixels B x F x H x W x 3, and in their order the mp4 files (none if saving failed) and the scores by part."""

    name: str
    pixels: Tensor
    captions: Sequence[str]
    fps: float
    files: Sequence[Path] = ()
    scores: Sequence[Mapping[str, float | None]] = ()


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""

    def show(self, iteration: int, clips: ShownClips) -> None:
        """Log videos."""

    def close(self) -> None:
        """Flush."""


class TensorBoard(Sink):
    """Scalars. Written synchronously, not by torch's SummaryWriter: when the disk is full its thread fails later and
    elsewhere, or `flush` waits forever for it."""

    def __init__(self, folder: Path, *, purge_from: int | None) -> None:
        self.folder = folder
        self._purge, self._numbers = purge_from, itertools.count()
        self._stream: IO[bytes] | None = None

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append an event. After a failure the next one starts another file: readers stop at a half-written event."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        events: list[dict[str, Any]] = [{"step": iteration, "summary": Summary(value=values)}]
        stream, self._stream = self._stream, None
        if stream is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            moment = f"{time.time():017.6f}"  # readers take files in the order of their names
            name = f"events.out.tfevents.{moment}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
            stream = (self.folder / name).open("xb")
            if self._purge is not None:  # hides events of another process from this step on
                events.insert(0, {"step": self._purge, "session_log": SessionLog(status=SessionLog.START)})
            events.insert(0, {"file_version": "brain.Event:2"})
        try:
            record = RecordWriter(stream)
            for event in events:
                record.write(Event(wall_time=time.time(), **event).SerializeToString())
            stream.flush()
        except OSError:
            with suppress(OSError):  # it still has the data that could not be written
                stream.close()
            raise
        self._stream, self._purge = stream, None

    def show(self, iteration: int, clips: ShownClips) -> None:
        """Videos stay in the run's folder."""

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class Wandb(Sink):
    """Weights & Biases; offline without a key to log in with, or without a network."""

    def __init__(self, folder: Path, log: LogConfig, config: Mapping[str, Any], identity: str) -> None:
        import wandb

        self._wandb = wandb
        init = partial(
            wandb.init,
            project=log.wandb,
            entity=log.entity,
            group=log.group,
            tags=log.tags,
            name=log.name or folder.name,
            id=identity,
            dir=str(folder),
            config=dict(config),
        )
        stdin = sys.stdin
        try:
            with open(os.devnull) as sys.stdin:  # without a terminal it cannot ask for a key, and raises instead
                self._run = init(resume="allow")
        except (wandb.errors.Error, OSError) as error:
            warnings.warn(
                f"wandb cannot log in ({type(error).__name__}: {error}): logged offline to {folder / 'wandb'}; `wandb login` and "
                "`wandb sync` upload it later.",
                stacklevel=2,
            )
            self._run = init(mode="offline")
        finally:
            sys.stdin = stdin

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "iteration": iteration})

    def show(self, iteration: int, clips: ShownClips) -> None:
        """Log the mp4 files, and a table of them with scores; from pixels W&B would encode them again, with a package of its own."""
        files = [(file, caption) for file, caption in zip(clips.files, clips.captions) if file.is_file()]
        if not files:
            return
        videos = [self._wandb.Video(str(file), caption=caption, format="mp4") for file, caption in files]
        logged = {clips.name: videos, "iteration": iteration}
        if len(clips.scores) == len(videos):
            rows = [
                [caption, video, *scores.values()] for (_, caption), video, scores in zip(files, videos, clips.scores)
            ]
            logged[f"{clips.name}_scores"] = self._wandb.Table(columns=["prompt", "clip", *clips.scores[0]], data=rows)
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()


class Metrics:
    """The journal and all sinks of a run; ranks other than the first have none."""

    def __init__(self, sinks: Sequence[Sink] = (), journal: Journal | None = None) -> None:
        self.sinks, self.journal = list(sinks), journal
        self._failures = [0] * len(self.sinks)

    @classmethod
    def open(
        cls, out: Path, log: LogConfig, config: Mapping[str, Any], *, journal: Journal, resumed_at: int | None
    ) -> Metrics:
        """Open the configured sinks; they drop rows after `resumed_at`, which are computed again."""
        sinks: list[Sink] = []
        if log.tensorboard:
            # Also without a checkpoint: a run that was killed before its first one has left events in the folder.
            sinks.append(TensorBoard(out / "tensorboard", purge_from=0 if resumed_at is None else resumed_at + 1))
        makers: dict[str, Callable[[], Sink]] = {}
        identity = run_id(out, resumed=resumed_at is not None)
        if log.wandb is not None:
            if "wandb" not in sys.modules and find_spec("wandb") is None:
                raise ValueError("log.wandb needs a package that is not installed: pip install 'sage-grpo[wandb]'.")
            makers["wandb"] = partial(Wandb, out, log, config, identity)
        makers |= {path: partial(find_sink(path), out, config) for path in log.sinks}
        for name, make in makers.items():
            attempt(f"Starting {name}", lambda make=make: sinks.append(make()))  # type: ignore[misc]
        return cls(sinks, journal)

    @property
    def rows(self) -> bytes:
        return b"" if self.journal is None else bytes(self.journal.rows)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if self.journal is not None:
            self.journal.write(iteration, metrics)
        self._log("write", iteration, metrics)

    def show(self, iteration: int, clips: ShownClips) -> None:
        self._log("show", iteration, clips)

    def _log(self, method: str, iteration: int, content: Any) -> None:
        for index, sink in enumerate(self.sinks):
            if self._failures[index] == FAILURES:
                continue
            name, log = type(sink).__name__, partial(getattr(sink, method), iteration, content)
            worked = attempt(f"Logging iteration {iteration} to {name}", log)
            self._failures[index] = 0 if worked else self._failures[index] + 1
            if self._failures[index] == FAILURES:
                warnings.warn(f"{name} failed {FAILURES} times in a row: no more is logged to it.", stacklevel=3)

    def close(self) -> None:
        for sink in self.sinks:
            attempt(f"Closing {type(sink).__name__}", sink.close)


def run_id(out: Path, *, resumed: bool) -> str:
    """The run's id at W&B: random, and stored in its folder. A resumed run without one predates the id, when the folder's
    name was used."""
    file = inside(out, RUN_ID)
    if not file.exists():
        replace_text(file, out.name if resumed else secrets.token_hex(4))
    identity = ""
    if file.is_file():  # a pipe would block
        with file.open(encoding="utf-8", errors="replace") as stream:
            identity = stream.read(LONGEST_ID + 1)
    if not identity.isprintable() or not 0 < len(identity) <= LONGEST_ID:
        raise ValueError(f"{file} does not hold the id of a run: delete it, and W&B begins a new run.")
    return identity


def find_sink(path: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """Import a user's sink class; it is called with the run's folder and its configuration."""
    kind = import_object(path, "log.sinks")
    missing = [name for name in ("write", "show", "close") if not callable(getattr(kind, name, None))]
    if missing or not isinstance(kind, type):
        raise ValueError(
            f"log.sinks {path!r} is not a sink: it must be a class with the methods write, show and close; see docs/extending.md."
        )
    return kind


def attempt(what: str, action: Callable[[], Any]) -> bool:
    """Run an optional action; if it fails, the run goes on with a warning. Returns True if it worked."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - neither a full disk nor a logger's fault ends a run of days
        warnings.warn(f"{what} failed ({type(error).__name__}: {error}). The run continues.", stacklevel=3)
        return False
    return True
