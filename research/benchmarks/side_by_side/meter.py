"""Stopwatches for phases and passes, counters of passes, and the line of JSON. Knows no framework."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from job import Job, choose_level

CUDA = torch.cuda.is_available()
BEGIN = time.perf_counter()
LONGER = 3.5
"""How much longer than all passes before it a pass may be: a training pass is four forward passes, a guided one two plain ones."""
SHORT = 2.0
"""Seconds; more than one longer pass is not worth the wait."""


def sync() -> None:
    """Wait for the GPU."""
    if CUDA:
        torch.cuda.synchronize()


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def _reset_peak() -> None:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


class Meter:
    """Seconds and peak GiB of phases. Phases may nest: a phase's own figures leave out the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}
        self.forwards: dict[str, int] = {}
        """Samples that went through the network, by phase."""
        self._stack: list[list[Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        sync()
        if self._stack:
            self._stack[-1][2] = max(self._stack[-1][2], _peak())
        _reset_peak()
        frame = [name, 0.0, 0.0]  # name, seconds of inner phases, peak
        self._stack.append(frame)
        begin = time.perf_counter()
        try:
            yield
        finally:
            sync()
            seconds, peak = time.perf_counter() - begin, max(frame[2], _peak())
            _reset_peak()
            self._stack.pop()
            if self._stack:
                self._stack[-1][1] += seconds
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - frame[1]
            self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), peak)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Measure a method of one object; what it does stays as it is."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def measured(*given: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*given, **named)

        setattr(owner, method, measured)

    @property
    def outermost(self) -> str:
        """The phase that is measured now; of nested ones the first."""
        return self._stack[0][0] if self._stack else ""

    def count(self, last: torch.nn.Module, phase: Callable[[], str]) -> None:
        """Count the samples that come out of a network's last projection, which runs once a pass and is never recomputed."""

        def add(module: torch.nn.Module, given: Any, output: torch.Tensor) -> None:
            self.forwards[phase()] = self.forwards.get(phase(), 0) + len(output)

        last.register_forward_hook(add)

    def take(self) -> dict[str, Any]:
        """All figures since the last call."""
        figures = {"seconds": self.seconds, "peak_gib": self.peak_gib, "forwards": self.forwards}
        self.seconds, self.peak_gib, self.forwards = {}, {}, {}
        return figures


def measure_iterations(
    content: dict[str, Any],
    job: Job,
    options: Mapping[str, Any],
    note: Callable[[str], None],
    iterate: Callable[[Job], dict[str, Any]],
) -> None:
    """A warm-up, then timed iterations of the largest part of the job that fits; the one with the median of seconds counts."""
    warm, repeats = iterate(job.warmup()), options["repeats"]
    note(f"warm-up {warm['seconds']}")
    spent, level = time.perf_counter() - BEGIN, options["level"]
    if level is None:
        level = choose_level(job, warm["seconds"], 0.0, (options["share"] - spent) / repeats)
    part, rounds = job.part(level), []
    for _ in range(repeats):
        rounds.append(iterate(part))
        note(f"level {level} {rounds[-1]['seconds']}")
    rounds.sort(key=lambda one: sum(one["seconds"].values()))
    jobs = [job.whole(part, one["seconds"]) for one in rounds]
    middle = (repeats - 1) // 2
    content |= {"warmup": warm, "level": level, "timed": rounds[middle], "job_seconds": jobs[middle]}
    content["totals"] = [seconds["total"] for seconds in jobs]


def measure_passes(passes: Mapping[str, Callable[[], Any]], until: float) -> dict[str, Any]:
    """Seconds and peak GiB of each after one to warm up, the least of three where they are short.

    A pass that would not end before `until` (seconds of this process), by those before it, is left out and says so.
    """
    results: dict[str, Any] = {}
    longest = 0.0
    for name, run in passes.items():
        left = until - (time.perf_counter() - BEGIN)
        if 2 * LONGER * longest > left:
            results[name] = {"left_out": f"{2 * LONGER * longest:.0f} s for two of them, {left:.0f} s left"}
            continue
        run()
        sync()
        _reset_peak()
        times: list[float] = []
        while len(times) < (3 if sum(times) < SHORT else 1):
            begin = time.perf_counter()
            run()
            sync()
            times.append(time.perf_counter() - begin)
        longest = max(longest, min(times))
        results[name] = {"seconds": min(times), "peak_gib": _peak()}
    return results


class Line:
    """The line of JSON of one process. It is written whatever happens: at the end, at an error, at a SIGTERM."""

    def __init__(self, out: Path, **head: Any) -> None:
        self.out = out
        packages = ("torch", "diffusers", "transformers", "peft", "accelerate")
        self.content: dict[str, Any] = {
            **head,
            "status": "started",
            "device": torch.cuda.get_device_name() if CUDA else "cpu",
            "versions": {name: _version(name) for name in packages},
        }

    def note(self, text: str) -> None:
        """Say where it stands."""
        print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)

    @contextmanager
    def written(self) -> Iterator[dict[str, Any]]:
        """Fill in the content."""
        before = signal.signal(signal.SIGTERM, self._terminated)
        try:
            yield self.content
        except BaseException as error:
            self.content["error"] = f"{type(error).__name__}: {str(error)[:500]}"
            self._write("failed")
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        self._write("ok")

    def _terminated(self, *_: Any) -> None:
        self._write("stopped: out of time")
        os._exit(124)

    def _write(self, status: str) -> None:
        self.content |= {"status": status, "process_seconds": time.perf_counter() - BEGIN}
        append(self.out, self.content)


def append(out: Path, content: Mapping[str, Any]) -> None:
    """Add one line to the file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_plain(content)) + "\n")


def _plain(value: Any) -> Any:
    """For JSON, which has no NaN; with all digits, since ratios are made of them."""
    if isinstance(value, float):
        return None if value != value else value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a wheel that was unpacked onto the path may lack its metadata
        return None


def lora_report(parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Trained parameters and their dtype."""
    return {
        "parameters": sum(p.numel() for p in parameters.values()),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()}),
    }
