"""Events of a run for callbacks, and the request to stop it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


class StopRequest:
    """Set by a program, in any thread, or by SIGTERM, SIGINT or the terminal's end (SIGHUP); a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._set = threading.Event()

    def set(self) -> None:
        """Ask the run to stop: it finishes its iteration, saves and ends. An evaluation is cut short and done again later."""
        self._set.set()

    @property
    def asked(self) -> bool:
        return self.signal is not None or self._set.is_set()

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch the signals while inside; this works in the main thread only, other threads call `set`."""

        def note(number: int, frame: Any) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        names = ("SIGTERM", "SIGINT", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
        numbers = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
        # Under nohup a run ignores SIGHUP and outlives its terminal.
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, note) for number in heard}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class IterationEvent:
    """An iteration is done."""

    iteration: int
    metrics: dict[str, float]
    """Its row of metrics.jsonl."""
    videos: Tensor
    """The clips that this process scored, uint8 N x F x H x W x 3."""
    prompts: list[str]


@dataclass(frozen=True)
class EvaluationEvent:
    """An evaluation is done."""

    iteration: int
    metrics: dict[str, float]
    """`eval/total`, `eval/<part>`, ..."""
    videos: Tensor
    """The first few clips (`evaluate.show`)."""
    prompts: list[str]
    best: bool


@dataclass(frozen=True)
class CheckpointEvent:
    """A checkpoint was saved."""

    iteration: int
    folder: Path


@dataclass(frozen=True)
class SentinelEvent:
    """A finding of the sentinel, or an action on it."""

    iteration: int
    name: str
    """The finding: spread_vanished, hacking, ...; joined by " and " where one action answers several."""
    text: str
    """The measurement, its meaning and the remedy."""
    action: str
    """warn, lower_lr, rollback or stop."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that the main process calls; an exception in one ends the run on all ranks after saving."""

    iteration: Callable[[IterationEvent], object] | None = None
    evaluation: Callable[[EvaluationEvent], object] | None = None
    checkpoint: Callable[[CheckpointEvent], object] | None = None
    sentinel: Callable[[SentinelEvent], object] | None = None


class CallbackFailed(RuntimeError):
    """A callback raised in the main process, which has its traceback."""


@dataclass(frozen=True)
class RunEnded:
    """End of a run."""

    iteration: int
    stopped: bool
    """True if it was asked to stop before the last iteration."""
    model: Any = None
    """Its model; None where no iteration was left."""
