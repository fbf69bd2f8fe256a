"""Gradients are reduced once per optimizer update, in the last backward pass of its accumulation."""

from __future__ import annotations

import dataclasses

import dist_workers as workers
import numpy as np
import processes
import pytest

from double import CLOSE
from sage_grpo.parallel.spec import ParallelSpec

pytestmark = pytest.mark.slow

UPDATES = 2
SHARDED = 3
"""Groups of parameters: two blocks and the rest."""


@pytest.fixture(scope="module")
def config(checkpoint, tmp_path_factory):
    """Without guidance a pass is one forward; with it, FSDP reduces once for each of its two."""
    return workers.configure(checkpoint("hunyuan15_t2v"), tmp_path_factory.mktemp("sync"), guidance=1.0, iterations=1)


@pytest.fixture(scope="module")
def alone(config):
    return processes.alone(workers.train, config)


def distance(result, alone) -> float:
    """Largest difference of weights after one iteration."""
    names = [name for name in alone["state"] if name.startswith("weights/")]
    return max(float(np.abs(result["state"][name] - alone["state"][name]).max()) for name in names)


def test_once_per_update(config, alone) -> None:
    result = processes.run(workers.count_reductions, 2, config, False)[0]
    assert isinstance(result, dict), result
    assert result["calls"] == UPDATES * SHARDED
    assert distance(result, alone) < CLOSE


def test_every_pass_when_asked(config, alone) -> None:
    spec = ParallelSpec(sync_every_pass=True, reshard=False, timeout=60)
    result = processes.run(workers.count_reductions, 2, dataclasses.replace(config, parallel=spec), False, spec=spec)[0]
    assert isinstance(result, dict), result
    passes = 2  # trained steps: of three, the last is deterministic
    rounds = 2  # micro-batches of a rank
    assert result["calls"] == passes * rounds * SHARDED
    assert distance(result, alone) < CLOSE


def test_without_it_the_run_is_another(config, alone) -> None:
    result = processes.run(workers.count_reductions, 2, config, True)[0]
    assert isinstance(result, dict), result
    assert result["calls"] == 0
    assert distance(result, alone) > 1e-5
