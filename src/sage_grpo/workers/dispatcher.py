"""Distributes the tasks of iterations to workers, and assembles their results into one rollout. It is independent of
the workers' transport.

Workers may join and leave: another worker repeats a lost task with the same noise and the same weights, so results do
not depend on the worker.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Event, RLock, Thread

import torch
from torch import nn

from sage_grpo.distributed.spec import RaySpec
from sage_grpo.training.engine import Conditions, RolloutEngine
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import PastWeights, Snapshot
from sage_grpo.training.rollout import Rollout
from sage_grpo.workers.messages import (
    RolloutTask,
    TaskResult,
    WorkerError,
    checked,
    log_prob,
    moved,
    packed,
    rollout_of,
)
from sage_grpo.workers.pool import JobResult, WorkerPool

ATTEMPTS = 3
"""Failures of a job at which the run fails; lost workers do not count."""
WAIT = 0.5
"""Longest wait in seconds in one round of starting jobs and collecting results."""
LARGEST = ("crew/staleness", "crew/waited_s", "crew/gap")
"""Metrics that are a maximum over all training processes; the others are summed."""


@dataclass
class PendingIteration:
    """This process's part of an iteration that is being sampled."""

    plan: Plan
    jobs: list[RolloutTask]
    conditions: Conditions
    """Conditionings on the trainer's device."""
    since: int
    """The iteration in which its weights were the newest."""
    weights: Snapshot | None
    """These weights, if they may be old when the iteration is due."""
    results: dict[int, tuple[str, TaskResult]] = field(default_factory=dict)
    """Results by part, with the worker."""
    failed: Counter[int] = field(default_factory=Counter)
    """Number of failures by part."""

    @property
    def done(self) -> bool:
        """True if every part is done."""
        return len(self.results) == len(self.jobs)


class Dispatcher:
    """Makes the rollouts of a trainer with workers. Each training process has its own, with its own workers; decisions
    about the run are common to all."""

    def __init__(
        self,
        studio: RolloutEngine,
        params: Mapping[str, nn.Parameter],
        hands: WorkerPool,
        spec: RaySpec,
        clip: float,
        past: PastWeights | None = None,
    ) -> None:
        """clip: the clip range; past: old weights, if iterations are sampled before they are due."""
        self.studio, self.params, self.hands, self.spec, self.past = studio, dict(params), hands, spec, past
        self.limit = spec.limit * clip
        self.row: dict[str, float] = {}
        """Metrics of the last iteration."""
        self.gaps: dict[str, float] = {}
        """Difference of every worker's log-probability from the trainer's when last measured."""
        self._orders: dict[int, PendingIteration] = {}
        """Orders by iteration."""
        self._queue: deque[RolloutTask] = deque()
        self._running: dict[str, RolloutTask] = {}
        self._free: dict[str, float] = {}
        """Time since which a worker has been idle."""
        self._version, self._idle, self._lost, self._refused = -1, 0.0, 0, 0
        self._alive = time.monotonic()
        self._lock, self._closed, self._error = RLock(), Event(), ""
        self._thread = Thread(target=self._between, name="foreman", daemon=True) if past is not None else None
        if self._thread is not None:
            self._thread.start()

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        """The rollout of the due iteration; the `coming` ones are started with the current weights."""
        promised: dict[int, tuple[int, Snapshot | None]] = {due.iteration: (due.iteration, None)}
        if self.past is not None:
            promised = dict(self.past.promise(due.iteration, [plan.iteration for plan in coming]))
        with self._lock:
            # Results of discarded weights (after a rollback) are discarded as well.
            self._orders = {n: one for n, one in self._orders.items() if promised.get(n) == (one.since, one.weights)}
            self._queue = deque(job for job in self._queue if self._wanted(job))
            versions = {order.since: order.jobs[0].version for order in self._orders.values()}
            for plan in (due, *coming):
                if plan.iteration in self._orders:
                    continue
                since, weights = promised[plan.iteration]
                if since not in versions:
                    self._version = versions[since] = self._version + 1
                    with _applied(weights):
                        self.hands.publish(self._version, packed(self.params), min(versions.values()))
                self._order(plan, since, weights, versions[since], whole=shows(plan.iteration))
        order = self._orders[due.iteration]
        queued, began = len(self._queue), time.monotonic()
        self._until(order)
        while self._refuse(order):
            self._until(order)
        self._tell(order, queued, time.monotonic() - began)
        with self._lock:
            del self._orders[due.iteration]
        results = [order.results[part][1] for part in range(len(order.jobs))]
        law = partial(self.studio.replayed, due, conditions=order.conditions)
        return rollout_of(due, self.studio.world.rank, results, law, self.studio.model.device)

    def close(self) -> None:
        """Stop all workers."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self.hands.close()

    def _order(self, plan: Plan, since: int, weights: Snapshot | None, version: int, *, whole: bool) -> None:
        conditions, rank = self.studio.conditions(plan), self.studio.world.rank
        travelling = moved(conditions, torch.device("cpu"))
        prompts = {group.number: group.prompt for group in plan.groups}
        shown = tuple(prompts[number] for number in sorted(prompts))
        owns = [{group: travelling[group] for group in task.members(0)} for task in plan.tasks(rank)]
        jobs = [RolloutTask(plan.iteration, rank, part, version, shown, own, whole) for part, own in enumerate(owns)]
        self._orders[plan.iteration] = PendingIteration(plan, jobs, conditions, since, weights)
        self._queue.extend(jobs)

    def _wanted(self, job: RolloutTask) -> bool:
        """True if a job has not been discarded."""
        order = self._orders.get(job.iteration)
        return order is not None and order.jobs[job.part] is job

    def _between(self) -> None:
        """Keep the workers busy while the trainer does something else."""
        while not self._closed.is_set() and not self._error:
            self._work(WAIT / 10)
            time.sleep(WAIT / 100 if self._running else WAIT / 5)

    def _until(self, order: PendingIteration) -> None:
        """Wait for all parts; an error in one training process ends the run in all."""
        tick, told = self.studio.clock.ticker(len(order.jobs)), 0
        while not order.done and not self._error:
            self._work(WAIT)
            for _ in range(told, len(order.results)):
                tick()
            told = max(told, len(order.results))
        errors = [text for text in self.studio.world.texts(self._error) if text]
        if errors:
            raise WorkerError(errors[0])

    def _work(self, seconds: float) -> None:
        with self._lock:
            try:
                self._round(seconds)
            except WorkerError as error:
                self._error = str(error)

    def _round(self, seconds: float) -> None:
        """Start jobs on idle workers, and collect results."""
        ready, now = list(self.hands.ready()), time.monotonic()
        self._free = {worker: self._free.get(worker, now) for worker in ready if worker not in self._running}
        if ready or not self._queue:
            self._alive = now
        hope = self.hands.hope()
        if not ready and not self._running and (hope or now - self._alive > self.spec.patience):
            why = hope or f"none was there for {self.spec.patience:g} seconds (rollout.ray.patience)"
            raise WorkerError(f"There is no worker to sample clips: {why}. A continued run begins where this one ends.")
        longest = sorted(self._free, key=lambda worker: self._free[worker])
        for worker in longest[: len(self._queue)]:
            job = self._queue.popleft()
            self._idle += now - self._free.pop(worker)
            self._running[worker] = job
            self.hands.start(worker, job)
        for told in self.hands.wait(seconds):
            done, self._free[told.worker] = self._running.pop(told.worker, None), time.monotonic()
            if done is not None and self._wanted(done):
                self._take(told, done, self._orders[done.iteration])

    def _take(self, told: JobResult, job: RolloutTask, order: PendingIteration) -> None:
        if told.result is not None:
            order.results[job.part] = told.worker, told.result
            return
        self._queue.appendleft(job)
        self._lost += told.lost
        order.failed[job.part] += not told.lost
        if order.failed[job.part] == ATTEMPTS:
            raise WorkerError(
                f"Part {job.part + 1} of iteration {job.iteration + 1} failed {ATTEMPTS} times on workers, the last time on {told.worker}:\n"
                f"{told.error}"
            )

    def _refuse(self, order: PendingIteration) -> bool:
        """Dismiss workers whose log-probabilities differ from the trainer's; returns True if there are any, here or in
        another training process."""
        gaps = self._measure(order)
        self.gaps |= gaps
        wrong = [worker for worker, gap in gaps.items() if not gap <= self.limit]
        with self._lock:
            for worker in wrong:
                warnings.warn(
                    f"{worker} is refused: its log-probability of a step differs by {gaps[worker]:.2g} from that of the replay, and {self.limit:.2g} is "
                    "allowed (rollout.ray.limit). Others make its clips again.",
                    stacklevel=2,
                )
                self._dismiss(worker)
            if wrong and not self.hands.ready() and self.hands.hope():
                self._error = (
                    f"Every worker was refused: the log-probability of a step that {wrong[-1]} sampled differs by {gaps[wrong[-1]]:.2g} from that of "
                    f"its replay, and rollout.ray.limit allows {self.limit:.2g}. Workers need the trainer's checkpoint, model.dtype and version of "
                    "sage-grpo; `sage-grpo doctor` with the same options shows every worker."
                )
        return self.studio.world.any(bool(wrong))

    def _measure(self, order: PendingIteration) -> dict[str, float]:
        """Replay one step of every worker with the weights that sampled it; returns the differences of
        log-probabilities. A sharded network needs all training processes for a pass: those with fewer workers repeat
        their last one."""
        last = {worker: part for part, (worker, _) in sorted(order.results.items())}
        most = int(self.studio.world.gather(torch.tensor([len(last)])).max())
        parts, found = list(last.items()), {}
        with _applied(order.weights):
            for worker, part in parts + parts[-1:] * (most - len(parts)):
                result = order.results[part][1]
                replay = checked(order.plan, result.records)
                record = result.records[replay].record(*self.studio.replayed(order.plan, replay, order.conditions))
                stored = result.proof if record.log_prob_old is None else record.log_prob_old
                assert stored is not None
                found[worker] = float((log_prob(record, replay.step).cpu() - stored).abs().max())
        return found

    def _dismiss(self, worker: str) -> None:
        """Dismiss a worker; others repeat its jobs."""
        self._refused += 1
        self.hands.dismiss(worker)
        running = self._running.pop(worker, None)
        again = [running] if running is not None and self._wanted(running) else []
        for order in self._orders.values():
            own = [part for part, (by, _) in order.results.items() if by == worker]
            again += [order.jobs[part] for part in own]
            order.results = {part: made for part, made in order.results.items() if part not in own}
        self._queue.extendleft(again)

    def _tell(self, order: PendingIteration, queued: int, waited: float) -> None:
        results = [result for _, result in order.results.values()]
        own = {
            "crew/workers": len(self.hands.ready()),
            "crew/queue": queued,
            "crew/staleness": order.plan.iteration - order.since,
            "crew/waited_s": waited,
            "crew/busy_s": sum(result.seconds for result in results),
            "crew/idle_s": self._idle,
            "crew/megabytes": sum(result.bytes for result in results) / 1e6,
            "crew/gap": max(self.gaps[worker] for worker, _ in order.results.values()),
            "crew/lost": self._lost,
            "crew/refused": self._refused,
        }
        table = self.studio.world.gather(torch.tensor([list(own.values())], dtype=torch.float64))
        self.row = {
            name: float(column.max() if name in LARGEST else column.sum()) for name, column in zip(own, table.unbind(1))
        }
        self._idle = 0.0


def _applied(weights: Snapshot | None) -> AbstractContextManager[None]:
    """Context in which the model has these weights; None keeps its own."""
    return nullcontext() if weights is None else weights.applied()
