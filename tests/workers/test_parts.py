"""Messages, checks and bookkeeping of workers, without a run."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.distributed.world import World
from sage_grpo.models.lora import LoraSpec
from sage_grpo.models.policy import Policy
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.scoring import ScoredClips
from sage_grpo.workers import dispatcher, ray_pool
from sage_grpo.workers.dispatcher import LARGEST, Outcome, PendingIteration
from sage_grpo.workers.messages import TaskResult, WorkerError, packed, unpack
from sage_grpo.workers.worker import Worker


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
    def __init__(self, monkeypatch, *names: str, world: World | None = None) -> None:
        self.names, self.started, self.outcomes, self.gone, self.now, self.reason = list(names), [], [], [], 100.0, ""
        self.slept: list[float] = []
        self.waited: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(dispatcher, "time", clock)
        engine = SimpleNamespace(world=world or World())
        self.dispatcher = dispatcher.Dispatcher(engine, {}, self, RaySpec(limit=0.25, patience=50.0), 0.5)

    def ready(self) -> list[str]:
        return self.names

    def exhausted_reason(self) -> str:
        return self.reason

    def start(self, worker: str, task: Any) -> None:
        self.started.append((worker, task.part))

    def wait(self, seconds: float) -> list[Outcome]:
        self.waited.append(seconds)
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def dismiss(self, worker: str) -> None:
        self.gone.append(worker)
        self.names.remove(worker)

    def begin(self, parts: int) -> PendingIteration:
        tasks = [SimpleNamespace(iteration=4, part=part) for part in range(parts)]
        pending = PendingIteration(SimpleNamespace(iteration=4), tasks, {}, 3, None)
        self.dispatcher._pending[4] = pending
        self.dispatcher._queue.extend(tasks)
        return pending


@dataclass(frozen=True)
class Twice(World):
    def gather(self, values: torch.Tensor, group: object = None) -> torch.Tensor:
        return torch.cat([values, 2 * values]) if values.dtype == torch.float64 else values


def test_metrics_of_several_processes_are_summed_or_the_largest(monkeypatch) -> None:
    def row(world: World) -> dict[str, float]:
        one = Pool(monkeypatch, "a", "b", world=world).dispatcher
        results = [SimpleNamespace(seconds=seconds, bytes=10**6) for seconds in (2.0, 1.0)]
        by_part = {0: ("a", results[0]), 1: ("b", results[1])}
        one.gaps, one._idle, one._lost = {"a": 0.5, "b": 0.25}, 7.0, 2
        one._log(SimpleNamespace(plan=SimpleNamespace(iteration=5), since=3, results=by_part), 4, 1.5)
        return one.row

    alone, both = row(World()), row(Twice())
    assert tuple(alone.values()) == (2, 4, 2, 1.5, 3.0, 7.0, 2.0, 0.5, 2, 0)
    assert both == {name: (2 if name in LARGEST else 3) * value for name, value in alone.items()}
    clips = ScoredClips(torch.zeros(5, dtype=torch.uint8))
    assert TaskResult({}, None, [(MicroBatch(()), torch.zeros(3))], clips, 1.0).bytes == 4 * 3 + 5


def test_tasks_go_to_the_longest_idle_and_failed_ones_go_first(monkeypatch) -> None:
    pool = Pool(monkeypatch, "a", "b")
    one, pending = pool.dispatcher, pool.begin(3)
    one._free = {"b": 90.0, "a": 97.0}
    one._round(0.5)
    assert pool.started == [("b", 0), ("a", 1)]
    assert (one._idle, one._free, pool.waited) == (13.0, {}, [0.5])
    pool.now = 110.0
    pool.outcomes = [Outcome("b", error="no memory"), Outcome("a", result="done"), Outcome("stranger", result="x")]
    one._round(0.5)
    assert pending.results == {1: ("a", "done")}
    assert (pending.failed, one._lost, pending.done) == ({0: 1}, 0, False)
    assert [task.part for task in one._queue] == [0, 2]
    pool.outcomes = [Outcome("a", error="gone", lost=True)]
    one._round(0.5)
    assert pool.started[2:] == [("a", 0), ("b", 2)]
    assert (pending.failed[0], one._lost, [task.part for task in one._queue]) == (1, 1, [0])
    for times in (2, 3):
        pool.outcomes = [Outcome("a", error=f"again {times}")]
        one._work(0.5)
    assert one._error == "Part 1 of iteration 5 failed 3 times on workers, the last time on a:\nagain 3"


def test_a_run_without_workers_ends_after_its_patience_or_when_none_can_join(monkeypatch) -> None:
    pool = Pool(monkeypatch)
    pool.begin(1)
    pool.now = 150.0
    pool.dispatcher._round(0.5)
    pool.now = 150.1
    with pytest.raises(WorkerError, match="none was there for 50 seconds"):
        pool.dispatcher._round(0.5)
    pool.dispatcher._queue.clear()
    pool.dispatcher._round(0.5)  # no tasks: not waited for
    pool.dispatcher._queue.append(None)
    pool.dispatcher._round(0.5)
    pool.reason = "all were refused"
    with pytest.raises(WorkerError, match="clips: all were refused"):
        pool.dispatcher._round(0.5)


def test_workers_are_kept_busy_in_the_background_until_the_end(monkeypatch) -> None:
    pool, asked = Pool(monkeypatch), []
    one, wait = pool.dispatcher, dispatcher.WAIT

    def work(seconds: float) -> None:
        asked.append(seconds)
        one._running = {} if len(asked) > 1 else {"a": None}
        one._error = "over" * (len(asked) == 3)

    monkeypatch.setattr(one, "_work", work)
    one._work_in_background()
    assert asked == [wait / 10] * 3
    assert pool.slept == [wait / 100, wait / 5, wait / 5], "less between tasks than where there is none"
    one._error = ""
    one._closed.set()
    one._work_in_background()
    assert len(asked) == 3


@dataclass(frozen=True)
class Step:
    step: int


@dataclass(frozen=True)
class ThreeWorkers(World):
    def gather(self, values: torch.Tensor, group: object = None) -> torch.Tensor:
        return torch.cat([values, torch.tensor([3])])


def test_the_largest_difference_counts_and_a_worker_beyond_the_limit_is_dismissed(monkeypatch) -> None:
    """By the last part of each; a process with fewer workers repeats its last one, so that all run as many passes."""
    pool = Pool(monkeypatch, "a", "b", world=ThreeWorkers())
    one, pending, asked, own = pool.dispatcher, pool.begin(3), [], torch.tensor([1.0, 1.0])
    for part, (worker, stored) in [(2, ("a", [1.0, 3.0])), (1, ("b", None)), (0, ("a", [9.0, 9.0]))]:
        record = SimpleNamespace(log_prob_old=None if stored is None else torch.tensor(stored))
        saved = SimpleNamespace(record=lambda *_, record=record: record)
        pending.results[part] = worker, SimpleNamespace(records={Step(7): saved}, log_prob=own)
    one.engine.replayed = lambda plan, replay, conditions: (replay, conditions)
    monkeypatch.setattr(dispatcher, "checked", lambda plan, records: next(iter(records)))
    monkeypatch.setattr(
        dispatcher, "log_prob", lambda record, step: asked.append((record, step)) or torch.tensor([1.125, 1.0])
    )
    assert one._measure(pending) == {"b": 0.125, "a": 2.0}
    assert [step for _, step in asked] == [7, 7, 7]
    assert asked[1][0] is asked[2][0]
    assert one._measure(replace(pending, results={2: pending.results[2]})) == {"a": 2.0}
    assert [step for _, step in asked] == [7] * 6, "its only one three times"
    one.engine.world = World()
    one._running = {"a": pending.tasks[0]}
    with pytest.warns(UserWarning, match="a is refused: .* differs by 2 from that of the replay, and 0.12 is allowed"):
        assert one._refuse(pending)
    assert (pool.gone, one._refused, one._error) == (["a"], 1, "")
    assert pending.results.keys() == {1}, "0.125 is allowed"
    assert sorted(task.part for task in list(one._queue)[:3]) == [0, 0, 2], "before all others"
    assert not one._refuse(pending)
    monkeypatch.setattr(dispatcher, "log_prob", lambda record, step: torch.tensor([float("nan"), 1.0]))
    pool.reason = "all were refused"
    with pytest.warns(UserWarning, match="b is refused"):
        assert one._refuse(pending)
    assert one._error.startswith("Every worker was refused: the log-probability of a step that b sampled")


class Ray:
    """The functions of Ray that a pool needs; calls are done when they are waited for."""

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
        return SimpleNamespace(name=name, ready=call, run=call)

    def put(self, weights: bytes) -> int:
        self.stored.append(weights)
        return len(self.stored)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:num_returns], calls[num_returns:]

    def get(self, call: Any) -> Any:
        if self.fails:
            raise self.fails
        return "cpu" if len(call) == 1 else TaskResult({}, None, [], None, 1.0)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


def test_workers_on_a_cluster_start_work_fail_and_are_replaced(config, make_trainer, monkeypatch) -> None:
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
    assert (list(pool._actors), pool.ready()) == (["worker 2"], []), "every second of three is the other rank's"
    assert (pool.wait(1.0), pool.ready()) == ([], ["worker 2"])
    assert pool.wait(1.0) == []

    for version, oldest, kept in ((0, 0, [0]), (1, 0, [0, 1]), (2, 2, [2])):
        pool.publish(version, b"w", oldest)
        assert list(pool._weights) == kept
    task = SimpleNamespace(version=2)
    pool.start("worker 2", task)
    assert ray.asked[-1] == (task, 3), "the third weights"
    (outcome,) = pool.wait(1.0)
    assert (outcome.worker, outcome.lost, outcome.result.seconds) == ("worker 2", False, 1.0)

    ray.fails = ray.exceptions.RayTaskError("no memory")
    pool.start("worker 2", task)
    (outcome,) = pool.wait(1.0)
    assert (outcome.error, outcome.lost, pool.ready()) == ("no memory", False, ["worker 2"])
    ray.fails = ray.exceptions.RayError("its node is gone")
    pool.start("worker 2", task)
    (outcome,) = pool.wait(1.0)
    assert outcome.lost
    assert (pool.ready(), list(pool._actors), ray.killed) == ([], ["worker 4"], ["actor 0"])
    assert pool.exhausted_reason() == "", "a new one starts in its place"

    ray.fails = ray.exceptions.RayError("The actor died because of an error raised in its creation task: no reward")
    with pytest.warns(UserWarning, match="worker 4 could not start"):
        (outcome,) = pool.wait(1.0)
    assert "worker 4 could not start: The actor died" in pool.exhausted_reason()
    assert not pool._actors, "it would not start a second time either"
    more = replace(config, rollout=replace(config.rollout, ray=replace(spec, workers=4, gpus=None)))
    others = ray_pool.RayWorkerPool(more, engine, 1, 2)
    assert (list(others._actors), ray.options_["num_gpus"]) == (["worker 2", "worker 4"], 0.0)
    killed = len(ray.killed)
    others.close()
    assert (len(ray.killed) - killed, others.exhausted_reason()) == (2, "all were refused")
