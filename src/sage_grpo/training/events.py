"""What a run tells a program while it goes, and how it is asked to stop."""

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
        """Ask the run to stop: it finishes its iteration, saves and leaves. An evaluation is cut short and done again later."""
        self._set.set()

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self.signal is not None or self._set.is_set()

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch the signals while inside; only the main thread can, elsewhere `set` is the way to stop."""

        def note(number: int, frame: Any) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        names = ("SIGTERM", "SIGINT", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
        numbers = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
        # Under nohup the run is meant to outlive its terminal.
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
    """Iterations completed."""
    metrics: dict[str, float]
    """Its row of metrics.jsonl."""
    videos: Tensor
    """The clips that this process scored, uint8 N x F x H x W x 3."""
    prompts: list[str]
    """Their prompts."""


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
    """Whether it is the best so far."""


@dataclass(frozen=True)
class CheckpointEvent:
    """A checkpoint was saved."""

    iteration: int
    folder: Path
    complete: bool
    """False while it is still being written in the background (parallel.async_checkpoint)."""


@dataclass(frozen=True)
class SentinelEvent:
    """The sentinel found something, or did something about it."""

    iteration: int
    name: str
    """The finding: spread_vanished, hacking, ...; several with " and " between them where they were acted on together."""
    text: str
    """What was measured, what it means and what to do."""
    action: str
    """warn, lower_lr, rollback or stop."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that the main process calls; what one raises ends the run on all ranks, saved."""

    iteration: Callable[[IterationEvent], object] | None = None
    evaluation: Callable[[EvaluationEvent], object] | None = None
    checkpoint: Callable[[CheckpointEvent], object] | None = None
    sentinel: Callable[[SentinelEvent], object] | None = None


class CallbackFailed(RuntimeError):
    """A function that was to be told about the run raised in the main process, which has its traceback."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    iteration: int
    """Iterations completed."""
    stopped: bool
    """Whether it was asked to stop before the last one."""
    model: Any = None
    """Its model; None where nothing had to be done."""
