"""Seconds and memory per phase, and ticks for progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures phases; a listener (a progress bar) receives phases and ticks."""

    def __init__(self, listen: Callable[[str, int, int], None] = lambda phase, done, total: None) -> None:
        self.listen = listen
        self.phase = ""
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.phase, start = phase, time.perf_counter()
        self.listen(phase, 0, 1)
        yield
        if cuda:
            torch.cuda.synchronize()
            self._memory[phase] = torch.cuda.max_memory_allocated() / 2**30
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def ticker(self, total: int) -> Callable[[], None]:
        phase, done = self.phase, 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.listen(phase, done, total)

        return tick

    def report(self) -> dict[str, float]:
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/total"] = sum(self._seconds.values())
        metrics |= {f"time/peak_gib_{phase}": gib for phase, gib in self._memory.items()}
        self._seconds, self._memory = {}, {}
        return metrics
