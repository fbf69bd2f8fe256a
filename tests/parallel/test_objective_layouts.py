"""Objectives without an SDE in several layouts: ranks with 4 and 5 clips, a group on both, two experts, split clips."""

from __future__ import annotations

import dataclasses

import dist_workers as workers
import processes
import pytest
from test_equal_runs import check_learning, check_real_rewards

from double import CLOSE
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.objective import ObjectiveSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training import config as c

pytestmark = pytest.mark.slow

ANCHORED = {"trust_region": TrustRegion(mode="fixed")}
RUNS = [
    # checkpoint, LoRA, processes, sp, objective
    ("wan22_t2v", True, 2, 1, ObjectiveSpec(kind="nft", levels=2, draw="uniform", old_decay=0.5)),
    ("wan22_t2v both", True, 2, 1, ObjectiveSpec(kind="nft", levels=2, draw="uniform", old_decay=0.5)),
    ("wan22_t2v both", True, 2, 1, ObjectiveSpec(kind="gradient", levels=5, draw="last", credit="exact")),
    ("hunyuan15_t2v", False, 2, 2, ObjectiveSpec(kind="awm", levels=2)),
    ("wan_t2v", True, 2, 1, ObjectiveSpec(kind="gradient", levels=2, draw="last", credit="exact")),
    ("hunyuan15_t2v", False, 2, 2, ObjectiveSpec(kind="gradient", levels=2)),
    ("wan_t2v", True, 2, 1, ObjectiveSpec(kind="dpo", levels=2, beta=50.0)),
    ("hunyuan15_t2v", False, 2, 2, ObjectiveSpec(kind="sft", levels=2)),
]


@pytest.mark.parametrize(("kind", "lora", "ranks", "sp", "objective"), RUNS)
def test_objectives_are_the_same_run_in_every_layout(kind, lora, ranks, sp, objective, checkpoint, tmp_path) -> None:
    only = {
        "iterations": 4,
        "update": c.UpdateConfig(updates_per_rollout=1),
        "trust_region": TrustRegion(mode="none"),
        "kl": KlCoefficient(kind="constant"),
    }
    kind, _, expert = kind.partition(" ")
    config = workers.configure(
        checkpoint(kind),
        tmp_path,
        lora=lora,
        guidance=1.0,
        kernel=KernelSpec(name="ode"),
        objective=objective,
        surrogate=c.SurrogateConfig(equalize=False),
        batch=c.BatchConfig(prompts=3, group_size=3, micro_batch=2),
        rollout=c.RolloutConfig(steps=6),
        optimizer=c.OptimizerConfig(lr=1e-3, eps=1e-4),
        **(only if objective.by_gradient else only | ANCHORED if objective.by_choice else {}),
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, expert=expert or "high"))
    alone = processes.alone(workers.train, config)
    assert any(name.startswith("old/") for name in alone["state"]) == (objective.old_decay > 0)
    spec = ParallelSpec(sp=sp, timeout=60)
    results = processes.run(workers.train, ranks, dataclasses.replace(config, parallel=spec), spec=spec)
    for result in results:
        assert isinstance(result, dict), result
        assert (result["rewards"] == alone["rewards"]).all()
    check_real_rewards(results, alone)
    check_learning(results[0], alone)
    names = ("loss/policy", "gradient/norm", "kl/total")
    names += () if objective.by_gradient else ("matching/error", "matching/moved")
    for result in results:
        for row, expected in zip(result["rows"], alone["rows"]):
            assert row.keys() == expected.keys()
            for name in names:
                assert row[name] == pytest.approx(expected[name], rel=CLOSE, abs=1e-12), name
