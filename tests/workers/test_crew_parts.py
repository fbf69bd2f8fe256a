"""What travels, by what it is checked, what is told of it, and what a worker hears: each part for itself."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import nn

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.distributed.world import World
from sage_grpo.models.lora import LoraSpec
from sage_grpo.models.policy import Policy
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.training import engine
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.loss import needs_velocity_old
from sage_grpo.training.rollout import Rollout, SavedRecord, Storage
from sage_grpo.training.scoring import ScoredClips
from sage_grpo.types import Sound, VideoSpec
from sage_grpo.workers import dispatcher, ray_pool
from sage_grpo.workers.dispatcher import LARGEST, PendingIteration
from sage_grpo.workers.messages import TaskResult, WorkerError, checked, packed, unpack
from sage_grpo.workers.pool import JobResult
from sage_grpo.workers.worker import Worker


@pytest.fixture
def config(make_config):
    made = make_config(model={"lora": LoraSpec(rank=2)}, rollout={"steps": 3})
    made = replace(made, batch=BatchConfig(prompts=2, group_size=2, micro_batch=2))
    return replace(made, rollout=replace(made.rollout, on="ray", ray=RaySpec(limit=1e3)))


def test_another_step_checks_a_worker_in_every_iteration() -> None:
    records = dict.fromkeys("abc")
    found = [checked(SimpleNamespace(iteration=n), records) for n in range(5)]
    assert found == ["a", "b", "c", "a", "b"]


def test_bytes_are_those_of_everything_that_travels() -> None:
    x, clips = torch.zeros(2, 3), torch.zeros(5, dtype=torch.uint8)
    result = TaskResult({None: SavedRecord(x, x, None, None), 1: SavedRecord(x, x, x, x)}, None, [], None, 1.0)
    assert result.bytes == 5 * 24
    assert replace(result, latents=[(None, x)]).bytes == 6 * 24
    assert replace(result, judged=ScoredClips(clips, None)).bytes == 5 * 24 + 5


def test_weights_of_another_model_are_refused_by_name() -> None:
    weights = packed({"b": torch.ones(2), "a": torch.zeros(1), "z": torch.zeros(1)})
    with pytest.raises(WorkerError, match="model: a is only in one of them"):
        unpack(weights, {"b": nn.Parameter(torch.zeros(2))})
    with pytest.raises(WorkerError, match="model: c is only in one of them"):
        unpack(weights, {name: nn.Parameter(torch.zeros(1)) for name in "abcz"})


@dataclass(frozen=True)
class Twice(World):
    """Beside another process, whose figures are twice as large."""

    def gather(self, values: torch.Tensor, group: object = None) -> torch.Tensor:
        return torch.cat([values, 2 * values]) if values.dtype == torch.float64 else values


def test_figures_of_several_processes_are_added_up_or_the_largest(monkeypatch) -> None:
    def row(world: World) -> dict[str, float]:
        crew = Fake(monkeypatch, "a", "b", world=world).foreman
        made = [SimpleNamespace(seconds=seconds, bytes=10**6) for seconds in (2.0, 1.0)]
        results = {0: ("a", made[0]), 1: ("b", made[1])}
        crew.gaps, crew._idle, crew._lost = {"a": 0.5, "b": 0.25}, 7.0, 2
        crew._tell(SimpleNamespace(plan=SimpleNamespace(iteration=5), since=3, results=results), 4, 1.5)
        return crew.row

    alone, both = row(World()), row(Twice())
    figures = (2, 4, 2, 1.5, 3.0, 7.0, 2.0, 0.5, 2, 0)
    assert tuple(alone.values()) == figures
    assert both == {name: (2 if name in LARGEST else 3) * value for name, value in alone.items()}
    assert {"crew/gap", "crew/staleness"} <= {name for name in both if both[name] == 2 * alone[name] > 0}


@pytest.mark.parametrize(("whole", "hears", "heard"), [(True, False, True), (False, True, True), (False, False, False)])
def test_whoever_listens_gets_the_sound(whole: bool, hears: bool, heard: bool, monkeypatch) -> None:
    sound = Sound(torch.zeros(2, 1, 4), 4)
    monkeypatch.setattr(engine, "sound_of", lambda model, latents: sound if len(latents) == 2 else None)
    place = SimpleNamespace(
        reward=SimpleNamespace(hears=hears), latents=lambda rollout: torch.zeros(2, 3), model=None, vae=nullcontext
    )
    assert (RolloutEngine.listen(place, Rollout(), whole=whole) is sound) == heard


@pytest.mark.parametrize(
    ("whole", "needed", "asked", "entered"),
    [({}, [0, 3], None, 1), ({"whole": False}, [0, 3], [0, 3], 1), ({"whole": False}, [], [], 0)],
)
def test_only_frames_that_somebody_reads_are_decoded(
    whole: dict[str, bool], needed: list[int], asked: list[int] | None, entered: int, monkeypatch
) -> None:
    clips, sink, vae, ticks = MagicMock(), MagicMock(), MagicMock(), []
    clips.return_value.add.return_value = "decoded"
    vae.decoding.return_value.__enter__ = lambda self: ticks.append("in")
    monkeypatch.setattr(engine, "DecodedClips", clips)
    monkeypatch.setattr(engine, "frames_needed", lambda model, reward: needed if (model, reward) == ("m", "r") else 0)
    mine = [(MicroBatch((Member(1, 0), Member(0, 1))), torch.zeros(2, 3))]
    clock = SimpleNamespace(ticker=lambda number: lambda: ticks.append(number))
    place = SimpleNamespace(_mine=lambda rollout: mine, clock=clock, model="m", reward="r", vae=vae)
    prompts = [Prompt("a", metadata={"n": 1}), Prompt("b")]
    assert RolloutEngine.decode(place, Rollout(), sink, prompts, **whole) is clips.return_value.videos
    assert clips.call_args == call("m", asked, 2)
    assert clips.return_value.add.call_args.args[0] is mine[0][1]
    assert ticks == ["in"] * entered + [1]
    decoded, texts, metadata, latents = sink.add.call_args.args
    assert (decoded, texts, latents is mine[0][1]) == ("decoded", ["b", "a"], True)
    assert metadata[1] == {"n": 1} != metadata[0]


def test_latents_and_sound_reach_the_rewards_as_themselves(config, monkeypatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(engine, "score_here", lambda *arguments: given.append(arguments))
    place = SimpleNamespace(scored=lambda plan: [], reward="r", model=SimpleNamespace(video=SimpleNamespace(fps=8.0)))
    RolloutEngine.score(place, "videos", None, early="early", latents="latents", sound="sound")
    assert given == [("r", "videos", [], [], 8.0, "early", "latents", "sound")]


def test_a_worker_finds_the_code_of_the_user(config, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", ["/here"])
    Worker(config, 1, torch.get_num_threads(), ["/here", "/there"], {})
    assert sys.path == ["/here", "/there"]


@pytest.mark.parametrize("whole", [True, False])
def test_clips_and_their_sound_travel_where_somebody_looks_at_them(whole: bool) -> None:
    judged = ScoredClips(torch.ones(2, 1, 4, 4, 3), None, torch.ones(1), Sound(torch.ones(2, 1, 4), 4))
    worker = SimpleNamespace(
        studio=SimpleNamespace(model=SimpleNamespace(video=VideoSpec(frames=1, height=4, width=4)))
    )
    shown = Worker._shown(worker, judged, SimpleNamespace(whole=whole))
    assert (len(shown.videos), shown.sound is judged.sound, shown.sound is None) == (2 * whole, whole, not whole)
    assert shown.thumbnails is judged.thumbnails


def test_a_replay_of_one_clip_has_the_law_of_its_group(monkeypatch) -> None:
    """At fresh noise levels theirs; prompts that share passes are asked once."""
    levels = SimpleNamespace(kernel="fresh kernel", schedule="fresh levels")
    plan = SimpleNamespace(groups=[None, SimpleNamespace(levels=levels), SimpleNamespace(levels=None)])
    policy = Policy("model", "kernel", "schedule", 1.0)
    place = SimpleNamespace(policy=lambda group: policy)
    conditions = {1: "one", 2: "two"}
    for first, law in ((1, ("fresh kernel", "fresh levels")), (2, ("kernel", "schedule"))):
        for shared, rows in ((True, 1), (False, 2)):
            replay = SimpleNamespace(members=[Member(first, 0), Member(first, 1)], shared=shared)
            found, asked = RolloutEngine.replayed(place, plan, replay, conditions)
            assert (found.kernel, found.schedule) == law
            assert asked == (conditions[first],) * rows
    assert RolloutEngine.replayed(place, plan, SimpleNamespace(members=[Member(1, 4)], shared=False), conditions)[
        1
    ] == ("one",)


def test_a_studio_refuses_what_its_plan_or_model_cannot_do(config, make_trainer, monkeypatch) -> None:
    known, seen = make_trainer(replace(config, rollout=replace(config.rollout, on="here", ray=RaySpec()))).studio, []
    monkeypatch.setattr(engine.Planner, "check", lambda planner: seen.append(planner))
    monkeypatch.setattr(engine, "check_cheap", lambda *given: seen.append(given))
    for group in (None, "the other ranks of this clip"):
        one = RolloutEngine(known.config, known.model, known.reward, world=World(sequence_group=group))
        assert seen == [one.planner, (known.config, known.model, one.planner)]
        assert one.encoder is None
        seen.clear()
    kept = replace(known.config.rollout, storage="bfloat16", offload=True)
    for mode in ("none", "dual"):
        known.config = replace(known.config, rollout=kept, trust_region=TrustRegion(mode=mode))
        needed = needs_velocity_old(known.config.build_objective(), known.config.trust_region)
        assert known.storage == Storage(torch.bfloat16, torch.device("cpu"), needed)


class Fake:
    """Workers of which nothing is computed; a foreman with a clock that stands still."""

    def __init__(self, monkeypatch, *names: str, world: World | None = None) -> None:
        self.names, self.started, self.told, self.gone, self.now, self.hoped = list(names), [], [], [], 100.0, ""
        self.slept: list[float] = []
        self.waited: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(dispatcher, "time", clock)
        place = SimpleNamespace(world=world or World())
        self.foreman = dispatcher.Dispatcher(place, {}, self, RaySpec(limit=0.25, patience=50.0), 0.5)

    def ready(self) -> list[str]:
        return self.names

    def hope(self) -> str:
        return self.hoped

    def start(self, worker: str, job: Any) -> None:
        self.started.append((worker, job.part))

    def wait(self, seconds: float) -> list[JobResult]:
        self.waited.append(seconds)
        told, self.told = self.told, []
        return told

    def dismiss(self, worker: str) -> None:
        self.gone.append(worker)
        self.names.remove(worker)

    def order(self, parts: int) -> PendingIteration:
        jobs = [SimpleNamespace(iteration=4, part=part) for part in range(parts)]
        made = PendingIteration(SimpleNamespace(iteration=4), jobs, {}, 3, None)
        self.foreman._orders[4] = made
        self.foreman._queue.extend(jobs)
        return made


def test_jobs_go_to_who_waits_longest_and_come_back_first_where_they_failed(monkeypatch) -> None:
    crew = Fake(monkeypatch, "a", "b")
    order = crew.order(3)
    crew.foreman._free = {"b": 90.0, "a": 97.0}
    crew.foreman._round(0.5)
    assert crew.started == [("b", 0), ("a", 1)]
    assert (crew.foreman._idle, crew.foreman._free, crew.waited) == (13.0, {}, [0.5])
    crew.now, crew.told = (
        110.0,
        [JobResult("b", error="no memory"), JobResult("a", result="done"), JobResult("stranger", result="x")],
    )
    crew.foreman._round(0.5)
    assert order.results == {1: ("a", "done")}
    assert (order.failed, crew.foreman._lost, order.done) == ({0: 1}, 0, False)
    assert [job.part for job in crew.foreman._queue] == [0, 2], "first what failed"
    crew.told = [JobResult("a", error="gone", lost=True)]
    crew.foreman._round(0.5)
    assert crew.started[2:] == [("a", 0), ("b", 2)]
    assert (order.failed[0], crew.foreman._lost, [job.part for job in crew.foreman._queue]) == (1, 1, [0])
    for times in (2, 3):
        crew.told = [JobResult("a", error=f"again {times}")]
        crew.foreman._work(0.5)
    assert crew.foreman._error == ("Part 1 of iteration 5 failed 3 times on workers, the last time on a:\nagain 3")


def test_a_run_without_workers_ends_after_its_patience_or_without_hope(monkeypatch) -> None:
    crew = Fake(monkeypatch)
    crew.order(1)
    crew.now = 150.0
    crew.foreman._round(0.5)
    crew.now = 150.1
    with pytest.raises(WorkerError, match="none was there for 50 seconds"):
        crew.foreman._round(0.5)
    crew.foreman._queue.clear()
    crew.foreman._round(0.5)  # nothing is asked: it is not waited for
    crew.foreman._queue.append(None)
    crew.foreman._round(0.5)
    crew.hoped = "all were refused"
    with pytest.raises(WorkerError, match="clips: all were refused"):
        crew.foreman._round(0.5)


def test_workers_go_on_while_the_trainer_does_something_else(monkeypatch) -> None:
    crew, rounds = Fake(monkeypatch), []

    def work(seconds: float) -> None:
        rounds.append(seconds)
        crew.foreman._running = {"a": None} if len(rounds) == 1 else {}
        crew.foreman._error = "ends" if len(rounds) == 2 else ""

    crew.foreman._work = work
    crew.foreman._between()
    assert rounds == [dispatcher.WAIT / 10] * 2
    assert crew.slept == [dispatcher.WAIT / 100, dispatcher.WAIT / 5]
    crew.foreman._error = ""
    crew.foreman._closed.set()
    crew.foreman._between()
    assert len(rounds) == 2


@dataclass(frozen=True)
class Step:
    """As much of a replay as a check needs."""

    step: int


@dataclass(frozen=True)
class Asks(World):
    """Beside another process that has three workers."""

    def gather(self, values: torch.Tensor, group: object = None) -> torch.Tensor:
        return torch.cat([values, torch.tensor([3])])


def test_the_largest_difference_counts_and_a_worker_beyond_the_limit_goes(monkeypatch) -> None:
    """By the last part of each; a process with fewer workers repeats its last one, so that all run as many passes."""
    crew = Fake(monkeypatch, "a", "b", world=Asks())
    order, asked, proof = crew.order(3), [], torch.tensor([1.0, 1.0])
    for part, (worker, stored) in enumerate([("a", [9.0, 9.0]), ("b", None), ("a", [1.0, 3.0])]):
        record = SimpleNamespace(log_prob_old=None if stored is None else torch.tensor(stored))
        kept = SimpleNamespace(record=lambda *law, record=record: record)
        order.results[part] = worker, SimpleNamespace(records={Step(7): kept}, proof=proof)
    crew.foreman.studio.replayed = lambda plan, one, conditions: (one, conditions)
    monkeypatch.setattr(dispatcher, "checked", lambda plan, records: next(iter(records)))
    monkeypatch.setattr(
        dispatcher, "log_prob", lambda record, step: asked.append((record, step)) or torch.tensor([1.125, 1.0])
    )
    assert crew.foreman._measure(order) == {"b": 0.125, "a": 2.0}
    assert [step for _, step in asked] == [7, 7, 7]
    assert asked[1][0] is asked[2][0]
    crew.foreman.studio.world = World()
    crew.foreman._running = {"a": order.jobs[0]}
    with pytest.warns(UserWarning, match="a is refused: .* differs by 2 from that of the replay, and 0.12 is allowed"):
        assert crew.foreman._refuse(order)
    assert (crew.gone, crew.foreman._refused, crew.foreman._error) == (["a"], 1, "")
    assert order.results.keys() == {1}, "0.125 is allowed"
    assert sorted(job.part for job in list(crew.foreman._queue)[:3]) == [0, 0, 2], "before all others"
    assert crew.foreman.gaps == {"b": 0.125, "a": 2.0}
    assert not crew.foreman._refuse(order)
    monkeypatch.setattr(dispatcher, "log_prob", lambda record, step: torch.tensor([float("nan"), 1.0]))
    crew.hoped = "all were refused"
    with pytest.warns(UserWarning, match="b is refused"):
        assert crew.foreman._refuse(order)
    assert crew.foreman._error.startswith("Every worker was refused: the log-probability of a step that b sampled")


class Cluster:
    """As much of Ray as workers need: what was asked, and calls that are done when they are waited for."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self) -> None:
        self.options_: dict[str, float] = {}
        self.killed: list[str] = []
        self.stored: list[bytes] = []
        self.asked: list[Any] = []
        self._names = itertools.count()

    def remote(self, kind: type) -> Any:
        def options(**given: float) -> Any:
            self.options_ = given
            return SimpleNamespace(remote=lambda *given: self._actor(f"actor {next(self._names)}"))

        return SimpleNamespace(options=options)

    def _actor(self, name: str) -> Any:
        call = SimpleNamespace(remote=lambda *given: self.asked.append(given) or (name, *map(id, given)))
        return SimpleNamespace(name=name, ready=call, make=call)

    def put(self, weights: bytes) -> int:
        self.stored.append(weights)
        return len(self.stored)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:num_returns], calls[num_returns:]

    def get(self, call: Any) -> Any:
        if self.fails:
            raise self.fails
        return "cpu" if len(call) == 1 else TaskResult({}, None, [], None, 1.0)

    fails: Exception | None = None

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


def test_workers_on_a_cluster_come_work_fail_and_are_replaced(config, make_trainer, monkeypatch) -> None:
    ray, asked = Cluster(), []
    monkeypatch.setattr(ray_pool, "connected", lambda *given: asked.append(given) or nullcontext(ray))
    spec = RaySpec(address="127.0.0.1:1", workers=3, cpus=0.5, gpus=0.25)
    config = replace(config, rollout=replace(config.rollout, ray=spec, staleness=1))
    place = make_trainer(replace(config, rollout=replace(config.rollout, on="here", ray=RaySpec(), staleness=0))).studio
    hands = ray_pool.RayWorkerPool(config, place, rank=1, ranks=2)
    weights = sum(one.nbytes for one in place.model.trainable().values())
    assert asked == [("127.0.0.1:1", config.actor_cpus, 3 * weights)], (
        "room for what is old, what is new, and what comes"
    )
    assert ray.options_ == {"num_cpus": 0.5, "num_gpus": 0.25}
    assert (list(hands._actors), list(hands.ready())) == (["worker 2"], []), "every second of three is the other rank's"
    assert (list(hands.wait(1.0)), hands.ready()) == ([], ["worker 2"])
    assert hands.wait(1.0) == []

    for version, oldest in ((0, 0), (1, 0), (2, 2)):
        hands.publish(version, b"w", oldest)
    assert list(hands._weights) == [2]
    job = SimpleNamespace(version=2)
    hands.start("worker 2", job)
    assert ray.asked[-1] == (job, 3), "the third weights"
    (told,) = hands.wait(1.0)
    assert (told.worker, told.lost, told.result.seconds) == ("worker 2", False, 1.0)

    ray.fails = ray.exceptions.RayTaskError("no memory")
    hands.start("worker 2", job)
    (told,) = hands.wait(1.0)
    assert (told.error, told.lost, hands.ready()) == ("no memory", False, ["worker 2"]), "it raised, and is there"
    ray.fails = ray.exceptions.RayError("its node is gone")
    hands.start("worker 2", job)
    (told,) = hands.wait(1.0)
    assert told.lost
    assert (hands.ready(), list(hands._actors), ray.killed) == ([], ["worker 4"], ["actor 0"])
    assert hands.hope() == "", "another comes in its place"

    ray.fails = ray.exceptions.RayError("The actor died because of an error raised in its creation task: no reward")
    with pytest.warns(UserWarning, match="worker 4 could not start"):
        (told,) = hands.wait(1.0)
    assert "worker 4 could not start: The actor died" in hands.hope()
    assert not hands._actors, "it would not start a second time either"
    others = ray_pool.RayWorkerPool(
        replace(config, rollout=replace(config.rollout, ray=replace(spec, workers=4, gpus=None))), place, 1, 2
    )
    assert (list(others._actors), ray.options_["num_gpus"]) == (["worker 2", "worker 4"], 0.0)
    assert others.hope() == ""
    killed = len(ray.killed)
    others.close()
    assert (len(ray.killed) - killed, others.hope()) == (2, "all were refused")
