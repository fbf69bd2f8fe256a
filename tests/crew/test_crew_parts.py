"""What travels, by what it is checked, what is told of it, and what a worker hears: each part for itself."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import employing
from torch import nn

from sage_grpo.crew import on_ray, studio
from sage_grpo.crew.foreman import LARGEST
from sage_grpo.crew.jobs import CrewError, Result, checked, packed, unpack
from sage_grpo.crew.studio import Studio
from sage_grpo.crew.worker import Worker
from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.models.lora import LoraSpec
from sage_grpo.parallel.spec import RaySpec
from sage_grpo.parallel.world import World
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.rollout import Kept, Rollout
from sage_grpo.training.scoring import Judged
from sage_grpo.types import Sound, VideoSpec


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
    result = Result({None: Kept(x, x, None, None), 1: Kept(x, x, x, x)}, None, [], None, 1.0)
    assert result.bytes == 5 * 24
    assert replace(result, latents=[(None, x)]).bytes == 6 * 24
    assert replace(result, judged=Judged(clips, None)).bytes == 5 * 24 + 5


def test_weights_of_another_model_are_refused_by_name() -> None:
    weights = packed({"b": torch.ones(2), "a": torch.zeros(1), "z": torch.zeros(1)})
    with pytest.raises(CrewError, match="model: a is only in one of them"):
        unpack(weights, {"b": nn.Parameter(torch.zeros(2))})
    with pytest.raises(CrewError, match="model: c is only in one of them"):
        unpack(weights, {name: nn.Parameter(torch.zeros(1)) for name in "abcz"})


@dataclass(frozen=True)
class Twice(World):
    """Beside another process, whose figures are twice as large."""

    def gather(self, values: torch.Tensor, group: object = None) -> torch.Tensor:
        return torch.cat([values, 2 * values]) if values.dtype == torch.float64 else values


def test_figures_of_several_processes_are_added_up_or_the_largest(config, monkeypatch) -> None:
    def row(world: World) -> dict[str, float]:
        trainer = employing(monkeypatch, config, "a", "b", fate=lambda worker, job: "lies")
        trainer.step()
        order = SimpleNamespace(
            plan=SimpleNamespace(iteration=5),
            since=3,
            results={
                0: ("a", SimpleNamespace(seconds=2.0, bytes=10**6)),
                1: ("b", SimpleNamespace(seconds=1.0, bytes=10**6)),
            },
        )
        foreman = trainer.crew
        foreman.studio.world, foreman.gaps, foreman._idle, foreman._lost = world, {"a": 0.5, "b": 0.25}, 7.0, 2
        foreman._tell(order, 4, 1.5)
        return foreman.row

    alone, both = row(World()), row(Twice())
    figures = (2, 4, 2, 1.5, 3.0, 7.0, 2.0, 0.5, 2, 0)
    assert tuple(alone.values()) == figures
    assert both == {name: (2 if name in LARGEST else 3) * value for name, value in alone.items()}
    assert {"crew/gap", "crew/staleness"} <= {name for name in both if both[name] == 2 * alone[name] > 0}


@pytest.mark.parametrize(("whole", "hears", "heard"), [(True, False, True), (False, True, True), (False, False, False)])
def test_whoever_listens_gets_the_sound(whole: bool, hears: bool, heard: bool, monkeypatch) -> None:
    sound = Sound(torch.zeros(2, 1, 4), 4)
    monkeypatch.setattr(studio, "sound_of", lambda model, latents: sound if len(latents) == 2 else None)
    place = SimpleNamespace(
        reward=SimpleNamespace(hears=hears), latents=lambda rollout: torch.zeros(2, 3), model=None, vae=nullcontext
    )
    assert (Studio.listen(place, Rollout(), whole=whole) is sound) == heard


@pytest.mark.parametrize(
    ("whole", "small", "asked"), [(True, False, None), (False, False, [0, 3]), (False, True, None)]
)
def test_only_frames_that_somebody_reads_are_decoded_and_another_decoder_makes_whole_clips(
    whole: bool, small: bool, asked: list[int] | None, monkeypatch
) -> None:
    seen: list[Any] = []

    class Clips:
        videos = torch.zeros(0)

        def __init__(self, model: object, frames: object, count: int) -> None:
            seen.append((frames, count))

        def add(self, latents: torch.Tensor, decoder: object) -> None:
            seen.append(decoder)

    monkeypatch.setattr(studio, "Clips", Clips)
    monkeypatch.setattr(studio, "frames_needed", lambda model, reward: [0, 3])
    mine = [(MicroBatch((Member(0, 0), Member(0, 1))), torch.zeros(2, 3))]
    place = SimpleNamespace(
        _mine=lambda rollout: mine,
        clock=SimpleNamespace(ticker=lambda number: lambda: None),
        small="small" if small else None,
        model=None,
        reward=None,
        vae=SimpleNamespace(decoding=nullcontext),
    )
    Studio.decode(place, Rollout(), whole=whole)
    assert seen == [(asked, 2), place.small]


def test_latents_and_sound_reach_the_rewards_as_themselves(config, monkeypatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(studio, "score_here", lambda *arguments: given.append(arguments))
    place = SimpleNamespace(scored=lambda plan: [], reward="r", model=SimpleNamespace(video=SimpleNamespace(fps=8.0)))
    Studio.sheet(place, "videos", None, early="early", latents="latents", sound="sound")
    assert given == [("r", "videos", [], [], 8.0, "early", "latents", "sound")]


def test_a_worker_finds_the_code_of_the_user(config, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", ["/here"])
    Worker(config, 1, torch.get_num_threads(), ["/here", "/there"], {})
    assert sys.path == ["/here", "/there"]


@pytest.mark.parametrize("whole", [True, False])
def test_clips_and_their_sound_travel_where_somebody_looks_at_them(whole: bool) -> None:
    judged = Judged(torch.ones(2, 1, 4, 4, 3), None, torch.ones(1), Sound(torch.ones(2, 1, 4), 4))
    worker = SimpleNamespace(
        studio=SimpleNamespace(model=SimpleNamespace(video=VideoSpec(frames=1, height=4, width=4)))
    )
    shown = Worker._shown(worker, judged, SimpleNamespace(whole=whole))
    assert (len(shown.videos), shown.sound is judged.sound, shown.sound is None) == (2 * whole, whole, not whole)
    assert shown.thumbnails is judged.thumbnails


class Cluster:
    """As much of Ray as workers need: what was asked, and calls that are done when they are waited for."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self) -> None:
        self.options_: dict[str, float] = {}
        self.killed: list[str] = []
        self.stored: list[bytes] = []
        self._names = itertools.count()

    def remote(self, kind: type) -> Any:
        def options(**given: float) -> Any:
            self.options_ = given
            return SimpleNamespace(remote=lambda *given: self._actor(f"actor {next(self._names)}"))

        return SimpleNamespace(options=options)

    def _actor(self, name: str) -> Any:
        call = SimpleNamespace(remote=lambda *given: (name, *map(id, given)))
        return SimpleNamespace(name=name, ready=call, make=call)

    def put(self, weights: bytes) -> int:
        self.stored.append(weights)
        return len(self.stored)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:num_returns], calls[num_returns:]

    def get(self, call: Any) -> Any:
        if self.fails:
            raise self.fails
        return "cpu" if len(call) == 1 else Result({}, None, [], None, 1.0)

    fails: Exception | None = None

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


def test_workers_on_a_cluster_come_work_fail_and_are_replaced(config, make_trainer, monkeypatch) -> None:
    ray, asked = Cluster(), []
    monkeypatch.setattr(on_ray, "connected", lambda *given: asked.append(given) or nullcontext(ray))
    spec = RaySpec(address="127.0.0.1:1", workers=3, cpus=0.5, gpus=0.25)
    config = replace(config, rollout=replace(config.rollout, ray=spec, staleness=1))
    place = make_trainer(replace(config, rollout=replace(config.rollout, on="here", ray=RaySpec(), staleness=0))).studio
    hands = on_ray.RayHands(config, place, rank=1, ranks=2)
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
    hands.close()
