"""Real workers, on a cluster of two Ray nodes that both are this machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import worker_rewards
from test_dispatcher import figures

import needs
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.models.lora import LoraSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import BatchConfig
from sage_grpo.workers.messages import WorkerError
from sage_grpo.workers.ray_pool import LOOPBACK, find_ray
from trainer_helpers import same, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:worker")]
NODES, STORE = 2, 100 * 2**20
KILLED = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Nodes of one CPU each, on the loopback address; gone after the last test."""
    given = {"RAY_USAGE_STATS_ENABLED": "0", LOOPBACK: "0", "RAY_CLIENT_MODE": "0"}
    given |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    given["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"  # all of these Ray sets anyway
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    needs.module("ray")
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
    )
    for _ in range(NODES - 1):
        nodes.add_node(num_cpus=1, object_store_memory=STORE)
    yield nodes
    nodes.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture
def config(make_config, cluster):
    made = make_config(model={"lora": LoraSpec(rank=2)}, rollout={"steps": 3})
    ray = RaySpec(address=cluster.address, workers=NODES)
    return replace(
        made,
        iterations=10_000,
        batch=BatchConfig(prompts=6, group_size=2, micro_batch=2),
        rewards=[RewardSpec(name="worker_rewards:slow")],
        rollout=replace(made.rollout, on="ray", ray=ray),
    )


@pytest.fixture
def make(make_trainer) -> Iterator[Any]:
    made = []
    yield lambda config: made.append(make_trainer(config)) or made[-1]
    for trainer in made:
        trainer.close()


def until(trainer, reached) -> list[dict[str, float]]:
    rows, end = [], time.monotonic() + 240
    while not reached():
        assert time.monotonic() < end
        rows.append(figures(trainer.step()))
    return rows


def test_workers_that_are_killed_change_nothing_and_one_that_lies_ends_the_run(
    cluster, config, make, monkeypatch
) -> None:
    trainer = make(config)
    workers, draw = trainer.workers, random.Random(0)

    def kill() -> None:
        for _ in range(KILLED):
            time.sleep(draw.uniform(0.0, 1.0))
            victims = list(workers.ready.values())
            while not victims:
                time.sleep(0.05)
                victims = list(workers.ready.values())
            find_ray(cluster.address).kill(draw.choice(victims))

    killer = threading.Thread(target=kill)
    rows = [figures(trainer.step())]
    killer.start()
    rows += until(trainer, lambda: not killer.is_alive() and len(workers.ready) == NODES)
    monkeypatch.setattr(worker_rewards, "SECONDS", 0.0)
    alone = make(replace(config, rollout=replace(config.rollout, on="here", ray=RaySpec())))
    assert rows == [figures(alone.step()) for _ in rows]
    assert same(weights_of(trainer), weights_of(alone))
    # One that is made wrong on purpose.
    find_ray(cluster.address).get(next(iter(workers.ready.values())).__ray_call__.remote(spoil))
    with pytest.raises(WorkerError, match="differs by"):
        until(trainer, lambda: False)


def spoil(worker: Any) -> None:
    model = worker.engine.model
    velocity = model.velocity
    model.velocity = lambda *given, **named: 1.5 * velocity(*given, **named)


def test_a_cluster_of_its_own_is_only_this_machines(tmp_path) -> None:
    """Ray's servers listen on all addresses unless they are told otherwise."""
    script = """
import socket
from sage_grpo.workers.ray_pool import connected
opened = connected(None)
ray = opened.__enter__()
print({node["NodeManagerAddress"] for node in ray.nodes()}, ray.nodes()[0]["NodeManagerPort"])
port = ray.nodes()[0]["NodeManagerPort"]
socket.create_connection(("127.0.0.1", port), 2).close()
host = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); host.connect(("192.0.2.1", 9)); host = host.getsockname()[0]
try:
    socket.create_connection((host, port), 2)
except OSError:
    print("closed")
opened.__exit__(None, None, None)
"""
    if find_spec("ray") is None:  # imported here it would leave its traces
        needs.lacking("ray")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "{'127.0.0.1'}" in said.stdout, said.stdout + said.stderr
    assert "closed" in said.stdout
