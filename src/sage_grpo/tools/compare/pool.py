"""Many runs side by side: workers that take one run after another, a time budget, and the remaining runs."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from sage_grpo.tools.compare.prepare import CompareJob
from sage_grpo.tools.compare.store import KEPT_EVERY
from sage_grpo.tools.compare.worker import RunRequest, Worker, failed

Row = dict[str, Any]


class Estimates:
    """Seconds of an iteration, by arm and settings: from finished runs, and until there is one, from those under way."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._under_way: dict[str, float] = {}

    def learn(self, job: CompareJob, seconds: float, iterations: float, *, under_way: bool = False) -> None:
        """Add the iterations of a job and their seconds; of one under way, without its start."""
        if iterations > 0:
            (self._under_way if under_way else self._ended)[_kind(job)] = seconds / iterations

    def seconds(
        self, job: CompareJob, iterations: int, unknown: Callable[[Iterable[float]], float] = statistics.fmean
    ) -> float | None:
        """Seconds for so many iterations of a job; `unknown` makes a rate of the other arms' where its own is not known yet. None where
        no rate is known."""
        rates = {**self._under_way, **self._ended}
        if not rates:
            return None
        rate = rates.get(_kind(job))
        return iterations * (unknown(rates.values()) if rate is None else rate)


def _kind(job: CompareJob) -> str:
    """Key of runs that differ in their seed alone; suites may have arms of one name."""
    return json.dumps([job.arm, job.recipe, job.settings], sort_keys=True)


@dataclass
class UnderWay:
    """A run that a worker makes."""

    job: CompareJob
    worker: Worker
    connection: Connection
    began: float
    start: int
    """The iteration from which it resumes."""
    done: int
    heard: tuple[float, int] | None = None
    """Time and iteration of its first report. Time before that is its start, not its speed."""


class RunPool:
    """Makes runs in order on the workers; `on_row` gets every row."""

    def __init__(
        self,
        jobs: Sequence[CompareJob],
        workers: Sequence[Worker],
        on_row: Callable[[CompareJob, Row], None],
        request: Callable[[CompareJob], RunRequest],
        *,
        on_note: Callable[[CompareJob, str], None] = lambda job, text: None,
        kept: Mapping[str, int] | None = None,
        budget: float | None = None,
    ) -> None:
        """`on_note` gets notes for people; `kept` maps keys of unfinished runs to their last iteration."""
        self.waiting, self.workers, self.on_row = deque(jobs), list(workers), on_row
        self.request, self.on_note, self.kept, self.budget = request, on_note, dict(kept or {}), budget
        self.estimates, self.running = Estimates(), list[UnderWay]()
        self.began = time.monotonic()

    def run(self, look: Callable[[RunPool], None] = lambda pool: None, interval: float = 0.5) -> None:
        """Run until all jobs are done or the budget is spent; `look` is called at intervals. An interruption ends the workers."""
        try:
            while self.budget is None or self.elapsed <= self.budget or not self.running:
                self._fill()
                if not self.running:
                    return
                readable = wait([run.connection for run in self.running], interval)
                for run in [run for run in self.running if run.connection in readable]:
                    self._hear(run)
                look(self)
        finally:
            cut_off = [run.worker for run in self.running]  # they are neither done nor failed
            self.waiting.extendleft(run.job for run in reversed(self.running))
            self.running.clear()
            for worker in self.workers:
                worker.close(now=worker in cut_off)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Estimated seconds until all jobs are done."""
        todo = [(job, job.config.iterations - self.kept.get(job.key, 0)) for job in self.waiting]
        todo += [(run.job, run.job.config.iterations - run.done) for run in self.running]
        estimates = [self.estimates.seconds(job, iterations) for job, iterations in todo]
        known = [seconds for seconds in estimates if seconds is not None]
        if len(known) < len(todo):
            return None
        return max(sum(known) / max(1, len(self.workers)), max(known, default=0.0))

    def _fill(self) -> None:
        busy = [run.worker for run in self.running]
        for worker in self.workers:
            if worker not in busy and (job := self._take()) is not None:
                start = self.kept.get(job.key, 0)
                connection = worker.begin(self.request(job))
                self.running.append(UnderWay(job, worker, connection, time.monotonic(), start, start))

    def _take(self) -> CompareJob | None:
        """The next job that reaches a save within the budget: runs are saved at every evaluated point, and at intervals between."""
        for place, job in enumerate(self.waiting):
            needs = min(2 * KEPT_EVERY, self.estimates.seconds(job, self._stretch(job), max) or 0.0)
            if self.budget is None or self.elapsed + needs <= self.budget:
                del self.waiting[place]
                return job
        return None

    def _stretch(self, job: CompareJob) -> int:
        """Iterations until a job is saved the next time."""
        at, points = self.kept.get(job.key, 0), job.points or (job.config.iterations,)
        return next((point - at for point in points if point > at), 0)

    def _hear(self, run: UnderWay) -> None:
        message = run.worker.receive()
        if "note" in message:
            self.on_note(run.job, message["note"])
        if "done" in message:
            self._progress(run, message["done"])
        if "row" in message or "ended" in message:
            self.running.remove(run)
            row = message["row"] if "row" in message else failed(run.job, message["ended"])
            if row["status"] == "done":
                self.estimates.learn(run.job, time.monotonic() - run.began, run.job.config.iterations - run.start)
            self.on_row(run.job, row)

    def _progress(self, run: UnderWay, done: int) -> None:
        now = time.monotonic()
        if done < run.start:  # it did not resume
            run.start = self.kept[run.job.key] = 0
        run.done, run.heard = done, run.heard or (now, done)
        then, at = run.heard
        self.estimates.learn(run.job, now - then, done - at, under_way=True)
