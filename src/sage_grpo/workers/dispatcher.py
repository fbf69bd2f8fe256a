"""Distributes the tasks of iterations to workers, and assembles their results into one rollout; or samples here with stale weights.

A thread serves each worker. Workers may join and leave: another worker repeats a lost task with the same noise and the same weights, so results do not
depend on the worker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import nn

from sage_grpo.distributed.spec import RaySpec
from sage_grpo.training.engine import Conditions, RolloutEngine
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import PastWeights, Snapshot
from sage_grpo.training.rollout import Record, Rollout
from sage_grpo.training.trainer import Trainer
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import (
    RolloutTask,
    TaskResult,
    WorkerError,
    WorkerLost,
    checked,
    log_prob,
    moved,
    packed,
    rollout_of,
)

WAIT = 0.5
"""Seconds between two looks at whether there are workers."""
SUMMED = ("crew/workers", "crew/busy_s")
"""Metrics that are a sum over all training processes; of the others the largest counts."""


@dataclass
class Job:
    """A task on its way."""

    task: RolloutTask
    weights: Any  # the weights of its version, as the pool has published them
    result: Future[tuple[str, TaskResult]] = field(default_factory=Future)  # the worker, and its result
    discarded: bool = False


@dataclass
class PendingIteration:
    """This process's part of an iteration that is being sampled."""

    plan: Plan
    jobs: list[Job]
    conditions: Conditions  # conditionings on the trainer's device
    since: int  # the iteration in which its weights were the newest
    weights: Snapshot | None  # these weights, if they may be old when the iteration is due
    version: tuple[int, Any]  # their number, and these weights as the pool has published them

    @property
    def results(self) -> list[tuple[str, TaskResult]]:
        return [job.result.result() for job in self.jobs]


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
        self.row: dict[str, float] = {}  # metrics of the last iteration
        self.gaps: dict[str, float] = {}  # log-probabilities of every worker less the trainer's, when last measured
        self.ready: dict[str, Any] = {}  # workers that are there, by name
        self._pending: dict[int, PendingIteration] = {}
        # earlier iterations first, and the parts of one in their order; no job ends a worker's thread
        self._queue: PriorityQueue[tuple[int, int, int, Job | None]] = PriorityQueue()
        self._numbers = count()
        self._closed, self._reason = Event(), ""
        self._threads = [Thread(target=self._serve, args=(name,), name=name, daemon=True) for name in pool.names]
        for thread in self._threads:
            thread.start()

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        """The rollout of the due iteration; those of the `coming` ones that are not under way start with the current weights."""
        promised: dict[int, tuple[int, Snapshot | None]] = {due.iteration: (due.iteration, None)}
        if self.past is not None:
            promised = dict(self.past.promise(due.iteration, [plan.iteration for plan in coming]))
        for number, one in list(self._pending.items()):
            if promised.get(number) != (one.since, one.weights):  # results of weights that a rollback discarded
                for job in self._pending.pop(number).jobs:
                    job.discarded = True
        versions = {one.since: one.version for one in self._pending.values()}
        for plan in (due, *coming):
            if plan.iteration not in self._pending:
                since, weights = promised[plan.iteration]
                if since not in versions:
                    with _applied(weights):
                        versions[since] = next(self._numbers), self.pool.publish(packed(self.params))
                self._enqueue(plan, since, weights, versions[since], whole=shows(plan.iteration))
        pending = self._pending[due.iteration]
        began = time.monotonic()
        self._raise_together(self._wait_for(pending))
        self._raise_together(self._wrong_worker(pending))
        self._log(pending, time.monotonic() - began)
        del self._pending[due.iteration]
        results = [result for _, result in pending.results]
        replayed = partial(self.engine.replayed, due, conditions=pending.conditions)
        return rollout_of(due, self.engine.world.rank, results, replayed, self.engine.model.device)

    def close(self) -> None:
        self._closed.set()
        for _ in self._threads:
            self._queue.put((-1, 0, next(self._numbers), None))
        self.pool.kill()
        for thread in self._threads:
            thread.join()
        self.pool.close()

    def _enqueue(
        self, plan: Plan, since: int, weights: Snapshot | None, version: tuple[int, Any], *, whole: bool
    ) -> None:
        conditions, rank = self.engine.conditions(plan), self.engine.world.rank
        sent = moved(conditions, torch.device("cpu"))
        prompts = tuple(plan.prompts)
        jobs = []
        for part, task in enumerate(plan.tasks(rank)):
            needed = {group: sent[group] for group in task.members(0)}
            jobs.append(Job(RolloutTask(plan.iteration, rank, part, version[0], prompts, needed, whole), version[1]))
            self._put(jobs[-1])
        self._pending[plan.iteration] = PendingIteration(plan, jobs, conditions, since, weights, version)

    def _put(self, job: Job) -> None:
        self._queue.put((job.task.iteration, job.task.part, next(self._numbers), job))

    def _serve(self, name: str) -> None:
        while not self._closed.is_set():
            try:
                self.ready[name] = self.pool.start(name)
                while (job := self._queue.get()[-1]) is not None:
                    if not job.discarded:
                        self._run(name, job)
            except WorkerLost:
                self.ready.pop(name, None)
            except WorkerError as error:
                self._reason = f"{name} could not start: {error}"
                warnings.warn(self._reason, stacklevel=2)
                return

    def _run(self, name: str, job: Job) -> None:
        try:
            job.result.set_result((name, self.pool.run(self.ready[name], job.task, job.weights)))
        except WorkerLost:
            self._put(job)
            raise
        except Exception as error:  # noqa: BLE001 - users' rewards may raise anything
            where = f"Part {job.task.part + 1} of iteration {job.task.iteration + 1}"
            job.result.set_exception(WorkerError(f"{where} failed on {name}:\n{error}"))

    def _wait_for(self, pending: PendingIteration) -> str:
        """Wait for all parts; returns the reason if one fails or no worker comes."""
        tick, waiting = self.engine.clock.ticker(len(pending.jobs)), {job.result for job in pending.jobs}
        alive = time.monotonic()
        while waiting:
            done, waiting = wait(waiting, WAIT, FIRST_COMPLETED)
            for one in done:
                tick()
                if error := one.exception():
                    return str(error)
            if done or self.ready:
                alive = time.monotonic()
                continue
            reason = "" if any(thread.is_alive() for thread in self._threads) else self._reason
            if time.monotonic() - alive > self.spec.patience:
                reason = f"none was there for {self.spec.patience:g} seconds (rollout.ray.patience)"
            if reason:
                return f"There is no worker to sample clips: {reason}. A continued run begins where this one ends."
        return ""

    def _raise_together(self, error: str) -> None:
        errors = [text for text in self.engine.world.texts(error) if text]
        if errors:
            raise WorkerError(errors[0])

    def _wrong_worker(self, pending: PendingIteration) -> str:
        """Replay one step of every worker with the weights that sampled it; returns an error if a log-probability differs. A sharded network needs all
        training processes for a pass: those with fewer workers repeat their last one."""
        last = dict(pending.results)
        most = int(self.engine.world.gather(torch.tensor([len(last)])).max())
        parts, gaps = list(last.items()), {}
        with _applied(pending.weights):
            for worker, result in parts + parts[-1:] * (most - len(parts)):
                replay = checked(pending.plan, result.records)
                policy, rows = self.engine.replayed(pending.plan, replay, pending.conditions)
                record = Record(policy, rows, *result.records[replay])
                stored = result.log_prob if record.log_prob_old is None else record.log_prob_old
                assert stored is not None
                gaps[worker] = float((log_prob(record, replay.step).cpu() - stored).abs().max())
        self.gaps |= gaps
        wrong = [worker for worker, gap in gaps.items() if not gap <= self.limit]
        if not wrong:
            return ""
        return (
            f"The log-probability of a step that {wrong[0]} sampled differs by {gaps[wrong[0]]:.2g} from that of its replay, and {self.limit:.2g} is "
            "allowed (rollout.ray.limit). Workers need the trainer's checkpoint, model.dtype and version of sage-grpo; `sage-grpo doctor` with the same "
            "options shows every worker. A continued run begins where this one ends."
        )

    def _log(self, pending: PendingIteration, waited: float) -> None:
        metrics = {
            "crew/workers": len(self.ready),
            "crew/staleness": pending.plan.iteration - pending.since,
            "crew/waited_s": waited,
            "crew/busy_s": sum(result.seconds for _, result in pending.results),
            "crew/gap": max(self.gaps[worker] for worker, _ in pending.results),
        }
        table = self.engine.world.gather(torch.tensor([list(metrics.values())], dtype=torch.float64))
        columns = zip(metrics, table.unbind(1))
        self.row = {name: float(column.sum() if name in SUMMED else column.max()) for name, column in columns}


def _applied(weights: Snapshot | None) -> AbstractContextManager[None]:
    return nullcontext() if weights is None else weights.applied()


class StaleRollouts:
    """Samples in this process with weights that are some iterations old."""

    def __init__(self, engine: RolloutEngine, past: PastWeights) -> None:
        self.engine, self.past = engine, past
        self.row: dict[str, float] = {}

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        since, weights = self.past.promise(due.iteration, [plan.iteration for plan in coming])[due.iteration]
        self.row = {"crew/staleness": float(due.iteration - since)}
        with weights.applied():
            return self.engine.sampler(due).run()

    def close(self) -> None:
        """No resources to release."""


def make_workers(trainer: Trainer) -> Dispatcher | StaleRollouts | None:
    """The workers of a trainer; None if it samples itself."""
    engine, past, world, spec = trainer.engine, trainer.state.past, trainer.world, trainer.config.rollout
    if spec.on == "here":
        return None if past is None else StaleRollouts(engine, past)
    ray_pool.check(trainer.config, world.processes)
    if world.size > 1 and engine.model.others:
        raise WorkerError(
            f"rollout.on ray with {world.size} training processes needs a model with one network, and this one has {1 + len(engine.model.others)}: the "
            "processes that share them would not check their workers on the same one. Use one training process."
        )
    pool = ray_pool.RayWorkerPool(trainer.config, engine, world.rank, world.size)
    return Dispatcher(engine, trainer.state.params, pool, spec.ray, trainer.clip_range, past)
