"""Messages, checks and bookkeeping of workers, without a run."""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sage_grpo.data.groups import Member
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.distributed.world import World
from sage_grpo.models.lora import LoraSpec
from sage_grpo.models.policy import Policy
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.utils.clock import Clock
from sage_grpo.workers import dispatcher, ray_pool
from sage_grpo.workers.dispatcher import SUMMED, Job, PendingIteration
from sage_grpo.workers.messages import SavedRecord, TaskResult, WorkerError, WorkerLost, packed, unpack
from sage_grpo.workers.ray_pool import Worker


@pytest.fixture
def config(make_config):
    made = make_config(model={"lora": LoraSpec(rank=2)}, rollout={"steps": 3})
    made = replace(made, batch=BatchConfig(prompts=2, group_size=2, micro_batch=2))
    return replace(made, rollout=replace(made.rollout, on="ray", ray=RaySpec(limit=1e3)))


def test_weights_of_another_model_are_refused_by_name() -> None:
    weights = packed({"b": torch.ones(2), "a": torch.zeros(1), "z": torch.zeros(1)})
    with pytest.raises(WorkerError, match="model: a is only in one of them"):
        unpack(weights, {"b": nn.Parameter(torch.zeros(2))})
    with pytest.raises(WorkerError, match="model: c is only in one of them"):
        unpack(weights, {name: nn.Parameter(torch.zeros(1)) for name in "abcz"})


def test_a_worker_finds_the_code_of_the_user_and_has_the_trainers_threads(config, monkeypatch) -> None:
    here, threads = list(sys.path), []
    monkeypatch.setattr(sys, "path", list(here))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    Worker(config, 1, 17, [here[0], "/there"])
    assert sys.path == [*here, "/there"]
    assert threads[0] == 17


def test_a_replay_of_one_clip_has_the_policy_of_its_group() -> None:
    levels = SimpleNamespace(kernel="fresh kernel", schedule="fresh levels")
    plan = SimpleNamespace(groups=[None, SimpleNamespace(levels=levels), SimpleNamespace(levels=None)])
    engine = SimpleNamespace(policy=lambda group: Policy("model", "kernel", "schedule", 1.0))
    conditions = {1: "one", 2: "two"}
    for first, names in ((1, ("fresh kernel", "fresh levels")), (2, ("kernel", "schedule"))):
        for shared, rows in ((True, 1), (False, 2)):
            replay = SimpleNamespace(members=[Member(first, 0), Member(first, 1)], shared=shared)
            policy, rows_of = RolloutEngine.replayed(engine, plan, replay, conditions)
            assert (policy.kernel, policy.schedule) == names
            assert rows_of == (conditions[first],) * rows


class Pool:
    """A pool without workers; tests run its jobs."""

    def __init__(self, world: World | None = None, **spec: float) -> None:
        self.names: list[str] = []
        self.outcomes: list[Any] = []
        engine = SimpleNamespace(world=world or World(), clock=Clock())
        self.dispatcher = dispatcher.Dispatcher(engine, {}, self, RaySpec(limit=0.25, **spec), 0.5)
        self.dispatcher.ready = {name: name for name in "ab"}

    def run(self, worker: str, task: Any, weights: Any) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def begin(self, parts: int, iteration: int = 4) -> PendingIteration:
        jobs = [Job(SimpleNamespace(iteration=iteration, part=part), None) for part in range(parts)]
        for job in jobs:
            self.dispatcher._put(job)
        return PendingIteration(SimpleNamespace(iteration=iteration), jobs, {}, 3, None, (0, None))

    def queue(self) -> list[tuple[int, int]]:
        return [one[:2] for one in sorted(self.dispatcher._queue.queue)]


@dataclass(frozen=True)
class Twice(World):
    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, 2 * values]) if values.dtype == torch.float64 else values


def test_metrics_of_several_processes_are_summed_or_the_largest() -> None:
    def row(world: World) -> dict[str, float]:
        pool = Pool(world)
        pending = pool.begin(2)
        for job, worker, seconds in zip(pending.jobs, "ab", (2.0, 1.0)):
            job.result.set_result((worker, SimpleNamespace(seconds=seconds)))
        pool.dispatcher.gaps = {"a": 0.5, "b": 0.25}
        pool.dispatcher._log(pending, 1.5)
        return pool.dispatcher.row

    alone, both = row(World()), row(Twice())
    assert tuple(alone.values()) == (2, 1, 1.5, 3.0, 0.5)
    assert both == {name: (3 if name in SUMMED else 2) * value for name, value in alone.items()}


def test_lost_tasks_are_made_again_failed_ones_end_the_run_and_the_due_iteration_goes_first() -> None:
    pool = Pool()
    later, pending = pool.begin(1, iteration=5), pool.begin(2)
    assert pool.queue() == [(4, 0), (4, 1), (5, 0)]
    one, job = pool.dispatcher, pending.jobs[0]
    one._queue.queue.clear()
    pool.outcomes = [WorkerLost("gone"), "done", RuntimeError("no memory")]
    with pytest.raises(WorkerLost):
        one._run("a", job)
    assert pool.queue() == [(4, 0)]
    one._run("b", job)
    assert job.result.result() == ("b", "done")
    one._run("a", pending.jobs[1])
    assert one._wait_for(pending) == "Part 2 of iteration 5 failed on a:\nno memory"
    later.jobs[0].result.set_result(("a", "done"))
    assert one._wait_for(later) == ""


def test_a_run_without_workers_ends_after_its_patience_or_when_none_can_join(monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "WAIT", 0.01)
    pool = Pool(patience=0.05)
    pool.dispatcher.ready = {}
    began = time.monotonic()
    assert "none was there for 0.05 seconds" in pool.dispatcher._wait_for(pool.begin(1))
    assert time.monotonic() - began >= 0.05
    pool.dispatcher._reason = "worker 1 could not start: no checkpoint"
    assert "clips: worker 1 could not start: no checkpoint" in pool.dispatcher._wait_for(pool.begin(1))


def test_a_long_task_of_a_worker_that_is_there_costs_no_patience(monkeypatch) -> None:
    pool, moment, rounds = Pool(patience=2.0), itertools.count(), itertools.count()
    pending = pool.begin(1)
    result = pending.jobs[0].result

    def wait(waiting, seconds, when):
        if next(rounds) < 6:
            return set(), waiting
        result.set_result(("a", "done"))
        return {result}, set()

    monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: float(next(moment))))
    monkeypatch.setattr(dispatcher, "wait", wait)
    assert pool.dispatcher._wait_for(pending) == ""


class Starting:
    """A worker that is lost, comes back, and then cannot start."""

    names = ("worker 1",)

    def __init__(self) -> None:
        self.started, self.outcomes = 0, [WorkerLost("gone"), "done", WorkerLost("gone")]

    def start(self, name: str) -> str:
        self.started += 1
        if self.started == 3:
            raise WorkerError("no reward")
        return name

    def run(self, worker: str, task: Any, weights: Any) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.filterwarnings("ignore:worker 1 could not start")
def test_a_lost_worker_is_replaced_until_one_cannot_start(monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "WAIT", 0.01)
    one = dispatcher.Dispatcher(SimpleNamespace(clock=Clock()), {}, pool := Starting(), RaySpec(), 0.5)  # type: ignore[arg-type]
    jobs = [Job(SimpleNamespace(iteration=4, part=part), None) for part in range(3)]
    jobs[0].discarded = True
    pending = PendingIteration(None, jobs[1:], {}, 3, None, (0, None))  # type: ignore[arg-type]
    for job in jobs:
        one._put(job)
    assert one._wait_for(pending) == (
        "There is no worker to sample clips: worker 1 could not start: no reward. A continued run begins where this one ends."
    )
    assert (jobs[1].result.result(), pool.started, one.ready) == (("worker 1", "done"), 3, {})
    assert not jobs[0].result.done()


@dataclass(frozen=True)
class Step:
    step: int


@dataclass(frozen=True)
class ThreeWorkers(World):
    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, torch.tensor([3])])


def test_the_largest_difference_counts_and_a_worker_beyond_the_limit_is_named(monkeypatch) -> None:
    """By the last part of each; a process with fewer workers repeats its last one, so that all run as many passes."""
    pool = Pool(ThreeWorkers())
    one, pending, asked, own = pool.dispatcher, pool.begin(3), [], torch.tensor([1.0, 1.0])
    for part, (worker, stored) in [(2, ("a", [1.0, 3.0])), (1, ("b", None)), (0, ("a", [9.0, 9.0]))]:
        saved = SavedRecord(own, own, None, None if stored is None else torch.tensor(stored))
        pending.jobs[part].result.set_result((worker, SimpleNamespace(records={Step(7): saved}, log_prob=own)))
    one.engine.replayed = lambda plan, replay, conditions: (replay, conditions)
    monkeypatch.setattr(dispatcher, "checked", lambda plan, records: next(iter(records)))
    monkeypatch.setattr(
        dispatcher, "log_prob", lambda record, step: asked.append((record, step)) or torch.tensor([1.125, 1.0])
    )
    assert "of a step that a sampled differs by 2 from that of its replay, and 0.12 is" in one._wrong_worker(pending)
    assert one.gaps == {"b": 0.125, "a": 2.0}
    assert [step for _, step in asked] == [7, 7, 7]
    assert [record.log_prob_old is None for record, _ in asked] == [False, True, True]
    alone = replace(pending, jobs=pending.jobs[1:2])
    assert one._wrong_worker(alone) == "", "0.125 is allowed"
    assert [step for _, step in asked] == [7] * 6, "its only one three times"
    monkeypatch.setattr(dispatcher, "log_prob", lambda record, step: torch.tensor([float("nan"), 1.0]))
    assert "that b sampled differs by nan" in one._wrong_worker(alone)


class Ray:
    """The functions of Ray that a pool needs."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self) -> None:
        self.options_: dict[str, float] = {}
        self.killed: list[str] = []
        self.stored: list[bytes] = []
        self.asked: list[Any] = []
        self.fails: Exception | None = None
        self._names = itertools.count()

    def remote(self, kind: type) -> Any:
        def options(**given: float) -> Any:
            self.options_ = given
            return SimpleNamespace(remote=lambda *_: self._actor(f"actor {next(self._names)}"))

        return SimpleNamespace(options=options)

    def _actor(self, name: str) -> Any:
        call = SimpleNamespace(remote=lambda *given: self.asked.append(given) or (name, *map(id, given)))
        return SimpleNamespace(name=name, __ray_ready__=call, run=call)

    def put(self, weights: bytes) -> int:
        self.stored.append(weights)
        return len(self.stored)

    def get(self, call: Any) -> Any:
        if self.fails:
            raise self.fails
        return "cpu" if len(call) == 1 else TaskResult({}, None, [], None, 1.0)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


def test_workers_on_a_cluster_start_work_fail_and_end(config, make_trainer, monkeypatch) -> None:
    ray, asked = Ray(), []
    monkeypatch.setattr(ray_pool, "connected", lambda *given: asked.append(given) or nullcontext(ray))
    spec = RaySpec(address="127.0.0.1:1", workers=3, cpus=0.5, gpus=0.25)
    config = replace(config, rollout=replace(config.rollout, ray=spec, staleness=1))
    here = replace(config.rollout, on="here", ray=RaySpec(), staleness=0)
    engine = make_trainer(replace(config, rollout=here)).engine
    pool = ray_pool.RayWorkerPool(config, engine, rank=1, ranks=2)
    weights = sum(one.nbytes for one in engine.model.trainable().values())
    assert asked == [("127.0.0.1:1", 1.5, 3 * weights)], "room for old, new, and coming weights"
    assert ray.options_ == {"num_cpus": 0.5, "num_gpus": 0.25}
    assert pool.names == ["worker 2"], "every second of three is the other rank's"
    worker, task = pool.start("worker 2"), SimpleNamespace(version=2)
    assert pool.run(worker, task, pool.publish(b"w")).seconds == 1.0
    assert ray.asked[-1] == (task, 1)
    for raised, kind in (
        (ray.exceptions.RayTaskError("no memory"), ray.exceptions.RayTaskError),
        (ray.exceptions.RayError("its node is gone"), WorkerLost),
        (ray.exceptions.RayError("died because of an error raised in its creation task: no reward"), WorkerError),
    ):
        ray.fails = raised
        with pytest.raises(kind, match=str(raised)):
            pool.run(worker, task, 1)
    more = replace(config, rollout=replace(config.rollout, ray=replace(spec, workers=4, gpus=None)))
    others = ray_pool.RayWorkerPool(more, engine, 1, 2)
    assert (others.names, ray.options_["num_gpus"]) == (["worker 2", "worker 4"], 0.0)
    pool.kill()
    assert ray.killed == ["actor 0"]
    with pytest.raises(WorkerLost):
        pool.start("worker 2")
    pool.close()
