"""Many runs side by side: workers that take one job after another, a time budget, and the remaining jobs."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sage_grpo.tools.compare.engine import PlaceLost, RunWorker
from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.tools.compare.store import KEPT_EVERY

Row = dict[str, Any]
LOSSES = 3
"""Losses of its worker after which a run itself counts as the reason."""


class Estimates:
    """Seconds of an iteration, by arm and settings: from finished runs, and until there is one, from those under way."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._under_way: dict[str, float] = {}

    def learn(self, job: CompareJob, seconds: float, iterations: float) -> None:
        """Add a finished job: its iterations and their seconds."""
        if iterations > 0:
            self._ended[_kind(job)] = seconds / iterations

    def guess(self, job: CompareJob, seconds: float, iterations: float) -> None:
        """Add a job under way: its iterations and their seconds, without its start."""
        if iterations > 0:
            self._under_way[_kind(job)] = seconds / iterations

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


class RunPool:
    """Runs jobs in order on the workers; `on_row` gets every row, one at a time."""

    def __init__(
        self,
        jobs: Sequence[CompareJob],
        workers: Sequence[RunWorker],
        on_row: Callable[[CompareJob, Row], None],
        request: Callable[[CompareJob], Mapping[str, Any]],
        *,
        on_note: Callable[[CompareJob, str], None] = lambda job, text: None,
        kept: Mapping[str, int] | None = None,
        budget: float | None = None,
    ) -> None:
        """`request` makes a worker's message of a job; `on_note` gets notes for people; `kept` maps keys of unfinished runs to their last
        iteration."""
        self.waiting, self.workers, self.on_row = deque(jobs), list(workers), on_row
        self.request, self.on_note, self.kept, self.budget = request, on_note, dict(kept or {}), budget
        self.estimates, self.running = Estimates(), dict[str, tuple[CompareJob, float, int]]()
        self._heard = dict[str, tuple[float, int, int]]()
        """Of a run under way: time of its first report, its iteration then, and its iteration now. Time before that is its start, not its speed."""
        self.began = time.monotonic()
        self._lock, self._changed = threading.RLock(), threading.Event()
        self._stopped, self._lost = False, Counter[str]()
        self._fault: BaseException | None = None

    def run(self, look: Callable[[RunPool], None] = lambda pool: None, interval: float = 0.5) -> None:
        """Run until all jobs are done or the budget is spent; `look` is called at intervals. An interruption ends the workers."""
        threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and not self._over():
                self._changed.wait(interval)
                self._changed.clear()
                look(self)
                if self._fault is not None:
                    raise self._fault
                if self.budget is not None and self.elapsed > self.budget:
                    break
        finally:
            with self._lock:
                self._stopped, cut_off = True, bool(self.running)
            for worker in self.workers:
                worker.close(now=cut_off)
            for thread in threads:
                thread.join()
        if self._fault is not None:
            raise self._fault

    def _over(self) -> bool:
        """True when no job waits or runs; a worker may wait for room even then."""
        with self._lock:
            return not (self.waiting or self.running)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Estimated seconds until all jobs are done."""
        with self._lock:
            jobs = [*self.waiting, *(job for job, _, _ in self.running.values())]
            all_of_it = [self.estimates.seconds(job, self._ahead(job)) for job in jobs]
        known = [seconds for seconds in all_of_it if seconds is not None]
        if len(known) < len(jobs):
            return None
        return max(sum(known) / max(1, len(self.workers)), max(known, default=0.0))

    def _ahead(self, job: CompareJob) -> int:
        """Iterations that a job still has to do."""
        _, _, done = self._heard.get(job.key, (0.0, 0, self.kept.get(job.key, 0)))
        return job.config.iterations - done

    def _stretch(self, job: CompareJob) -> int:
        """Iterations until a job is saved the next time."""
        at, points = self.kept.get(job.key, 0), job.points or (job.config.iterations,)
        return next((point - at for point in points if point > at), 0)

    def _take(self) -> CompareJob | None:
        """The next job that reaches a save within the budget: runs are saved at every evaluated point, and at intervals between."""
        with self._lock:
            if self._stopped:
                return None
            for place, job in enumerate(self.waiting):
                needs = min(2 * KEPT_EVERY, self.estimates.seconds(job, self._stretch(job), max) or 0.0)
                if self.budget is None or self.elapsed + needs <= self.budget:
                    del self.waiting[place]
                    self.running[job.key] = (job, time.monotonic(), self.kept.get(job.key, 0))
                    return job
            return None

    def _serve(self, worker: RunWorker) -> None:
        try:
            while worker.ready() and (job := self._take()) is not None:
                try:
                    for words in worker.answer(json.dumps(self.request(job))):
                        if "row" in words or "ended" in words:
                            self._end(job, words.get("row") or words["ended"])
                        else:
                            self._hear(job, words)
                except PlaceLost as loss:
                    self._end(job, loss)
            worker.close(now=False)  # its room is free for another worker
        except BaseException as error:  # noqa: BLE001 - the thread's caller raises it
            self._fault = error
        self._changed.set()

    def _hear(self, job: CompareJob, words: Mapping[str, Any]) -> None:
        with self._lock:
            if "note" in words:
                self.on_note(job, words["note"])
            if "done" in words:
                now, done = time.monotonic(), int(words["done"])
                _, since, first = self.running[job.key]
                if done < first:  # it did not resume
                    self.running[job.key] = (job, since, 0)
                    del self.kept[job.key]
                then, at, _ = self._heard.get(job.key, (now, done, done))
                self._heard[job.key] = (then, at, done)
                self.estimates.guess(job, now - then, done - at)

    def _end(self, job: CompareJob, answer: Row | str | PlaceLost) -> None:
        """A job has its row, ended without one, or lost its worker."""
        with self._lock:
            _, since, first = self.running.pop(job.key)
            self._heard.pop(job.key, None)
            if not isinstance(answer, dict):
                fault, lost = str(answer), isinstance(answer, PlaceLost)
                self._lost[job.key] += lost
                again = lost and self._lost[job.key] < LOSSES
                if again:
                    self.on_note(job, f"{fault} It is made again.")
                if again or self._stopped:  # we ended it: it is neither done nor failed
                    self.waiting.appendleft(job)
                    return
                fault += f" It was lost with {LOSSES} places, and may be the reason." if lost else ""
                answer = {**head(job, "failed", fault), "evaluations": {}, "passes": {}}
            elif answer["status"] == "done":
                self.estimates.learn(job, time.monotonic() - since, job.config.iterations - first)
            self.on_row(job, answer)
        self._changed.set()
