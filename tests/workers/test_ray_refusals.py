"""What workers cannot do is refused before anything is loaded, with the reason."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.models.lora import LoraSpec
from sage_grpo.recipes.methods import dpo, nft
from sage_grpo.run.preflight import preflight
from sage_grpo.training.inputs import Overrides, build
from sage_grpo.training.trainer import Trainer
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import WorkerError


@pytest.fixture
def config(make_config):
    made = make_config(model={"lora": LoraSpec(rank=2)})
    return replace(made, rollout=replace(made.rollout, on="ray"))


def stale(config):
    return replace(config, rollout=replace(config.rollout, staleness=1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, model=replace(c.model, lora=None)), "model.lora null"),
        (lambda c: nft(stale(c)), "objective.kind nft does not go with rollout.staleness 1"),
        (lambda c: replace(dpo(c), data=replace(c.data, clips="own.jsonl"), rewards=[]), "data.clips: clips are given"),
        (
            lambda c: replace(stale(c), optimizer=replace(c.optimizer, max_kl=1.0)),
            "rollout.staleness 1 does not go with",
        ),
        (lambda c: replace(c, rollout=replace(c.rollout, on="here", ray=RaySpec(workers=3))), "about workers on Ray"),
    ],
)
def test_configurations(config, change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        change(config)


def test_what_only_the_start_knows(config, monkeypatch) -> None:
    monkeypatch.setattr(ray_pool, "find_ray", lambda address: None)
    with pytest.raises(WorkerError, match=r"2 training processes without rollout.ray.address"):
        preflight(config, ranks=2)
    there = replace(config, rollout=replace(config.rollout, ray=RaySpec(address="127.0.0.1:1", workers=1)))
    with pytest.raises(WorkerError, match=r"2 training processes with rollout.ray.workers 1"):
        preflight(there, ranks=2)
    ray_pool.check(replace(there, rollout=replace(there.rollout, ray=replace(there.rollout.ray, workers=2))), 2)
    with pytest.raises(WorkerError, match=r"2 training processes parallel.sp 2"):
        preflight(replace(there, parallel=replace(there.parallel, sp=2)), ranks=2)
    with pytest.raises(WorkerError, match="cannot have the reward mine that this program made"):
        preflight(config, given=Overrides(rewards={"mine": None}))  # type: ignore[dict-item]


def test_without_the_package_the_extra_is_named(config, monkeypatch) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", ray_pool.LOOPBACK):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "sage-grpo\[ray\]"'):
        preflight(config)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == os.environ[ray_pool.LOOPBACK] == "0"


class Ray:
    """As much of Ray as a connection needs: what it was asked."""

    def __init__(self, address: str = "127.0.0.1", there: bool = False, fails: Exception | None = None) -> None:
        self.address, self.open, self.fails, self.given = address, there, fails, {}

    def is_initialized(self) -> bool:
        return self.open

    def init(self, **options: object) -> None:
        if self.fails:
            raise self.fails
        self.open, self.given = True, options
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeManagerAddress": self.address}]

    def shutdown(self) -> None:
        self.open = False


@pytest.fixture
def connecting(monkeypatch):
    monkeypatch.setattr(ray_pool.os, "cpu_count", lambda: 4)
    given = signal.signal(signal.SIGTERM, before := lambda number, frame: None)

    def connect(ray: Ray, *given: Any) -> Any:
        monkeypatch.setattr(ray_pool, "find_ray", lambda address: ray)
        return ray_pool.connected(*given)

    yield connect
    found = signal.signal(signal.SIGTERM, given)
    assert found is before, "Ray takes the signal for itself"


def test_a_cluster_that_others_could_reach_is_not_used(connecting) -> None:
    ray = Ray("192.0.2.7")
    with pytest.raises(ConfigError, match=r"listens on 192.0.2.7, where others could run code"), connecting(ray, None):
        pass
    assert not ray.open


def test_a_cluster_of_ones_own_has_room_and_ends_and_others_stay(connecting, monkeypatch) -> None:
    fixed = {"log_to_driver": False, "logging_level": "ERROR"}
    for cpus, wanted in ((0, None), (4, None), (4.5, 5)):
        with connecting(Ray(), None, cpus, 1000) as ray:
            store = {"object_store_memory": 256 * 2**20 + 1000, "include_dashboard": False}
            assert ray.given == {"address": "local", "num_cpus": wanted, **store, **fixed}
            assert ray.open
        assert not ray.open
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: asked.append((place, timeout)) or Mock())
    asked: list[Any] = []
    with connecting(Ray("192.0.2.7"), "head:6379") as ray:
        assert (ray.given, asked) == ({"address": "head:6379", **fixed}, [(("head", 6379), 5)])
    with connecting(Ray("192.0.2.7"), "auto") as ray:
        assert (ray.given["address"], len(asked)) == ("auto", 1)
    with connecting(Ray(there=True), None) as ray:
        assert ray.given == {}
    assert ray.open, "it was there before"
    busy = connecting(Ray(fails=ValueError("busy")), None)
    with pytest.raises(ConfigError, match="Ray cluster at loopback: busy"), busy:
        pass


def test_a_trainer_without_workers_refuses_what_needs_them(config) -> None:
    """`rollout.on` and `rollout.staleness` would otherwise be ignored without a word."""
    here = replace(config, rollout=replace(config.rollout, on="here"))
    for asking in (config, stale(here)):
        with pytest.raises(ConfigError, match=r"run\.session\.assemble"):
            Trainer(asking, build(asking))
    Trainer(here, build(here)).close()


def test_addresses_without_a_cluster_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(ray_pool, "find_ray", lambda address: SimpleNamespace(is_initialized=lambda: False))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{closed.getsockname()[1]}", "ray://head", "head"):
            with (
                pytest.raises(ConfigError, match=f"No Ray cluster answers at '{address}'"),
                ray_pool.connected(address),
            ):
                pass
