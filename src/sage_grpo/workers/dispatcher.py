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
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import Conditions, RolloutEngine
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import PastWeights, Snapshot
from sage_grpo.training.rollout import Rollout
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import (
    Outcome,
    RolloutTask,
    TaskResult,
    WorkerError,
    checked,
    log_prob,
    moved,
    packed,
    rollout_of,
)
from sage_grpo.workers.stale_rollouts import StaleRollouts

ATTEMPTS = 3
"""Failures of a task at which the run fails; lost workers do not count."""
WAIT = 0.5
"""Longest wait in seconds in one round of starting tasks and collecting results."""
LARGEST = ("crew/staleness", "crew/waited_s", "crew/gap")
"""Metrics that are a maximum over all training processes; the others are summed."""


@dataclass
class PendingIteration:
    """This process's part of an iteration that is being sampled."""

    plan: Plan
    tasks: list[RolloutTask]
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
        return len(self.results) == len(self.tasks)


class Dispatcher:
    """Makes the rollouts of a trainer with workers. Each training process has its own, with its own workers; decisions
    about the run are common to all."""

    def __init__(
        self,
        engine: RolloutEngine,
        params: Mapping[str, nn.Parameter],
        pool: ray_pool.RayWorkerPool,
        spec: RaySpec,
        clip_range: float,
        past: PastWeights | None = None,
    ) -> None:
        """past: old weights, if iterations are sampled before they are due."""
        self.engine, self.params, self.pool, self.spec, self.past = engine, dict(params), pool, spec, past
        self.limit = spec.limit * clip_range
        self.row: dict[str, float] = {}
        """Metrics of the last iteration."""
        self.gaps: dict[str, float] = {}
        """Difference of every worker's log-probability from the trainer's when last measured."""
        self._pending: dict[int, PendingIteration] = {}
        self._queue: deque[RolloutTask] = deque()
        self._running: dict[str, RolloutTask] = {}
        self._free: dict[str, float] = {}
        """Time since which a worker has been idle."""
        self._version, self._idle, self._lost, self._refused = -1, 0.0, 0, 0
        self._alive = time.monotonic()
        self._lock, self._closed, self._error = RLock(), Event(), ""
        self._thread: Thread | None = None
        if past is not None:
            self._thread = Thread(target=self._work_in_background, name="dispatcher", daemon=True)
            self._thread.start()

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        """The rollout of the due iteration; the `coming` ones are started with the current weights."""
        promised: dict[int, tuple[int, Snapshot | None]] = {due.iteration: (due.iteration, None)}
        if self.past is not None:
            promised = dict(self.past.promise(due.iteration, [plan.iteration for plan in coming]))
        with self._lock:
            # Results of discarded weights (after a rollback) are discarded as well.
            self._pending = {n: one for n, one in self._pending.items() if promised.get(n) == (one.since, one.weights)}
            self._queue = deque(task for task in self._queue if self._wanted(task))
            versions = {one.since: one.tasks[0].version for one in self._pending.values()}
            for plan in (due, *coming):
                if plan.iteration in self._pending:
                    continue
                since, weights = promised[plan.iteration]
                if since not in versions:
                    self._version = versions[since] = self._version + 1
                    with _applied(weights):
                        self.pool.publish(self._version, packed(self.params), min(versions.values()))
                self._enqueue(plan, since, weights, versions[since], whole=shows(plan.iteration))
        pending = self._pending[due.iteration]
        queued, began = len(self._queue), time.monotonic()
        self._wait_for(pending)
        while self._refuse(pending):
            self._wait_for(pending)
        self._log(pending, queued, time.monotonic() - began)
        with self._lock:
            del self._pending[due.iteration]
        results = [pending.results[part][1] for part in range(len(pending.tasks))]
        replayed = partial(self.engine.replayed, due, conditions=pending.conditions)
        return rollout_of(due, self.engine.world.rank, results, replayed, self.engine.model.device)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self.pool.close()

    def _enqueue(self, plan: Plan, since: int, weights: Snapshot | None, version: int, *, whole: bool) -> None:
        conditions, rank = self.engine.conditions(plan), self.engine.world.rank
        sent = moved(conditions, torch.device("cpu"))
        prompts = tuple(plan.prompts)
        needed = [{group: sent[group] for group in task.members(0)} for task in plan.tasks(rank)]
        tasks = [
            RolloutTask(plan.iteration, rank, part, version, prompts, one, whole) for part, one in enumerate(needed)
        ]
        self._pending[plan.iteration] = PendingIteration(plan, tasks, conditions, since, weights)
        self._queue.extend(tasks)

    def _wanted(self, task: RolloutTask) -> bool:
        """True if a task has not been discarded."""
        pending = self._pending.get(task.iteration)
        return pending is not None and pending.tasks[task.part] is task

    def _work_in_background(self) -> None:
        """Keep the workers busy while the trainer does something else."""
        while not self._closed.is_set() and not self._error:
            self._work(WAIT / 10)
            time.sleep(WAIT / 100 if self._running else WAIT / 5)

    def _wait_for(self, pending: PendingIteration) -> None:
        """Wait for all parts; an error in one training process ends the run in all."""
        tick, ticked = self.engine.clock.ticker(len(pending.tasks)), 0
        while not pending.done and not self._error:
            self._work(WAIT)
            for _ in range(ticked, len(pending.results)):
                tick()
            ticked = max(ticked, len(pending.results))
        errors = [text for text in self.engine.world.texts(self._error) if text]
        if errors:
            raise WorkerError(errors[0])

    def _work(self, seconds: float) -> None:
        with self._lock:
            try:
                self._round(seconds)
            except WorkerError as error:
                self._error = str(error)

    def _round(self, seconds: float) -> None:
        """Start tasks on idle workers, and collect results."""
        ready, now = list(self.pool.ready()), time.monotonic()
        self._free = {worker: self._free.get(worker, now) for worker in ready if worker not in self._running}
        if ready or not self._queue:
            self._alive = now
        reason = self.pool.exhausted_reason()
        if not ready and not self._running and (reason or now - self._alive > self.spec.patience):
            reason = reason or f"none was there for {self.spec.patience:g} seconds (rollout.ray.patience)"
            raise WorkerError(
                f"There is no worker to sample clips: {reason}. A continued run begins where this one ends."
            )
        longest_idle = sorted(self._free, key=lambda worker: self._free[worker])
        for worker in longest_idle[: len(self._queue)]:
            task = self._queue.popleft()
            self._idle += now - self._free.pop(worker)
            self._running[worker] = task
            self.pool.start(worker, task)
        for outcome in self.pool.wait(seconds):
            ended, self._free[outcome.worker] = self._running.pop(outcome.worker, None), time.monotonic()
            if ended is not None and self._wanted(ended):
                self._take(outcome, ended, self._pending[ended.iteration])

    def _take(self, outcome: Outcome, task: RolloutTask, pending: PendingIteration) -> None:
        if outcome.result is not None:
            pending.results[task.part] = outcome.worker, outcome.result
            return
        self._queue.appendleft(task)
        self._lost += outcome.lost
        pending.failed[task.part] += not outcome.lost
        if pending.failed[task.part] == ATTEMPTS:
            raise WorkerError(
                f"Part {task.part + 1} of iteration {task.iteration + 1} failed {ATTEMPTS} times on workers, the last time on {outcome.worker}:\n"
                f"{outcome.error}"
            )

    def _refuse(self, pending: PendingIteration) -> bool:
        """Dismiss workers whose log-probabilities differ from the trainer's; returns True if there are any, here or in
        another training process."""
        gaps = self._measure(pending)
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
            if wrong and not self.pool.ready() and self.pool.exhausted_reason():
                self._error = (
                    f"Every worker was refused: the log-probability of a step that {wrong[-1]} sampled differs by {gaps[wrong[-1]]:.2g} from that of "
                    f"its replay, and rollout.ray.limit allows {self.limit:.2g}. Workers need the trainer's checkpoint, model.dtype and version of "
                    "sage-grpo; `sage-grpo doctor` with the same options shows every worker."
                )
        return self.engine.world.any(bool(wrong))

    def _measure(self, pending: PendingIteration) -> dict[str, float]:
        """Replay one step of every worker with the weights that sampled it; returns the differences of
        log-probabilities. A sharded network needs all training processes for a pass: those with fewer workers repeat
        their last one."""
        last = {worker: part for part, (worker, _) in sorted(pending.results.items())}
        most = int(self.engine.world.gather(torch.tensor([len(last)])).max())
        parts, gaps = list(last.items()), {}
        with _applied(pending.weights):
            for worker, part in parts + parts[-1:] * (most - len(parts)):
                result = pending.results[part][1]
                replay = checked(pending.plan, result.records)
                record = result.records[replay].record(*self.engine.replayed(pending.plan, replay, pending.conditions))
                stored = result.log_prob if record.log_prob_old is None else record.log_prob_old
                assert stored is not None
                gaps[worker] = float((log_prob(record, replay.step).cpu() - stored).abs().max())
        return gaps

    def _dismiss(self, worker: str) -> None:
        """Dismiss a worker; others repeat its tasks."""
        self._refused += 1
        self.pool.dismiss(worker)
        running = self._running.pop(worker, None)
        again = [running] if running is not None and self._wanted(running) else []
        for pending in self._pending.values():
            parts = [part for part, (by, _) in pending.results.items() if by == worker]
            again += [pending.tasks[part] for part in parts]
            pending.results = {part: result for part, result in pending.results.items() if part not in parts}
        self._queue.extendleft(again)

    def _log(self, pending: PendingIteration, queued: int, waited: float) -> None:
        """Set `row`, from all training processes."""
        results = [result for _, result in pending.results.values()]
        metrics = {
            "crew/workers": len(self.pool.ready()),
            "crew/queue": queued,
            "crew/staleness": pending.plan.iteration - pending.since,
            "crew/waited_s": waited,
            "crew/busy_s": sum(result.seconds for result in results),
            "crew/idle_s": self._idle,
            "crew/megabytes": sum(result.bytes for result in results) / 1e6,
            "crew/gap": max(self.gaps[worker] for worker, _ in pending.results.values()),
            "crew/lost": self._lost,
            "crew/refused": self._refused,
        }
        table = self.engine.world.gather(torch.tensor([list(metrics.values())], dtype=torch.float64))
        columns = zip(metrics, table.unbind(1))
        self.row = {name: float(column.max() if name in LARGEST else column.sum()) for name, column in columns}
        self._idle = 0.0


def _applied(weights: Snapshot | None) -> AbstractContextManager[None]:
    """Context in which the model has these weights; None keeps its own."""
    return nullcontext() if weights is None else weights.applied()


def make_workers(
    config: TrainConfig,
    engine: RolloutEngine,
    params: Mapping[str, nn.Parameter],
    past: PastWeights | None,
    clip_range: float,
) -> Dispatcher | StaleRollouts | None:
    """The workers of a trainer; None if it samples itself. `past` are old weights, if they sample."""
    rollout, world = config.rollout, engine.world
    if rollout.on == "here":
        return None if past is None else StaleRollouts(engine, past)
    ray_pool.check(config, world.processes)
    if world.size > 1 and engine.model.others:
        raise WorkerError(
            f"rollout.on ray with {world.size} training processes needs a model with one network, and this one has {1 + len(engine.model.others)}: the "
            "processes that share them would not check their workers on the same one. Use one training process."
        )
    pool = ray_pool.RayWorkerPool(config, engine, world.rank, world.size)
    return Dispatcher(engine, params, pool, rollout.ray, clip_range, past)
