"""Seconds and memory per phase, ticks for progress bars, and one iteration under torch's profiler.

A profile is a trace per phase, and a table of phases and kernels. A full-size iteration launches millions of kernels in passes that are all alike, so
only the first passes of every phase are recorded, beside the seconds of the whole phase. Recording only reads clocks: the run's numbers stay the
same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sage_grpo.utils.attempt import attempt
from sage_grpo.utils.safe_io import replace_text, replacing

PASSES = 8
"""Passes (or decoded clips) of a phase that are recorded."""
TOP = 12
"""Largest number of kernels per phase in the table."""
FOLDER, TABLE = "profile", "table.txt"


@dataclass(frozen=True)
class Recorded:
    """The recorded part of a phase."""

    phase: str
    seconds: float
    """Wall-clock time."""
    passes: int
    """Passes in it; 0 for a phase that has none."""
    kernels: str
    """Torch's table of the slowest kernels (on a CPU: operators)."""


class Recorder:
    """Records the phases of a clock, into a folder."""

    def __init__(self, folder: Path, passes: int = PASSES) -> None:
        self.folder, self.passes = folder, passes
        self.recorded: list[Recorded] = []
        self._running: profile | None = None
        self._phase, self._began, self._ticks = "", 0.0, 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.start()
        self._phase, self._began, self._ticks = name, time.perf_counter(), 0
        try:
            yield
        finally:
            self._stop()

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks == self.passes:
            self._stop()

    def _stop(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        running.stop()
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        kernels = running.key_averages().table(sort_by=order, row_limit=TOP, max_name_column_width=60)
        self.recorded.append(Recorded(self._phase, seconds, self._ticks, kernels))
        attempt(f"Writing a trace to {self.folder}", lambda: self._export(running))

    def _export(self, recording: profile) -> None:
        with replacing(self.folder / f"{self._phase}.json.gz", suffix=".partial.json.gz") as fresh:
            recording.export_chrome_trace(str(fresh))

    def write_table(self, iteration: int, row: Mapping[str, float]) -> str:
        """Write phases and kernels beside the traces; returns the phases. `row` has the seconds of whole phases as they are logged."""
        whole = sum(row.get(f"time/{part.phase}", part.seconds) for part in self.recorded)
        lines = [
            f"Iteration {iteration} to {iteration + 1}, recording included. A phase's first {PASSES} passes are recorded; kernels are of that part.",
            "",
            f"{'phase':<10}{'seconds':>10}{'share':>8}{'recorded':>10}{'passes':>8}",
        ]
        for part in self.recorded:
            seconds = row.get(f"time/{part.phase}", part.seconds)
            share = seconds / whole
            lines.append(f"{part.phase:<10}{seconds:>10.3f}{share:>8.0%}{part.seconds:>10.3f}{part.passes:>8}")
        phases = "\n".join(lines) + "\n"
        kernels = "".join(f"\n{part.phase}:\n{part.kernels}" for part in self.recorded)
        replace_text(self.folder / TABLE, phases + kernels)
        return phases


class Clock:
    """Measures phases; a listener (a progress bar) receives phases and ticks."""

    def __init__(self, listen: Callable[[str, int, int], None] = lambda phase, done, total: None) -> None:
        self.listen = listen
        self.phase = ""
        self.recorder: Recorder | None = None
        """Records phases while it is set."""
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        cuda = torch.cuda.is_available()
        with nullcontext() if self.recorder is None else self.recorder.phase(phase):
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
        """A function to call `total` times in this phase."""
        phase, done = self.phase, 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.listen(phase, done, total)
            if self.recorder is not None:
                self.recorder.tick()

        return tick

    def report(self) -> dict[str, float]:
        """Seconds (and GiB on a GPU) of every phase since the last report."""
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/total"] = sum(self._seconds.values())
        metrics |= {f"time/peak_gib_{phase}": gib for phase, gib in self._memory.items()}
        self._seconds, self._memory = {}, {}
        return metrics
