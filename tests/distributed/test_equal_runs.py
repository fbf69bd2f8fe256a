"""One process, data parallel, sequence parallel and both are the same run: one family each for dense, two experts and sound.

Rewards here depend on (iteration, group, member) alone, so rewards, advantages and starting noise must be equal to the bit. All else are
sums in another order: each rank adds up its own samples (and, with sequence parallelism, its own tokens) first, and attention sees its keys
in another order. Workers compute in float64 (double.py), so that this costs fewer digits than any error would.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import dist_workers as workers
import numpy as np
import processes
import pytest

from double import CLOSE
from sage_grpo.distributed.spec import ParallelSpec
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.plan.costs import forecast
from sage_grpo.plan.hardware import find
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.training import config as c
from sage_grpo.training.optim import TRIES

pytestmark = pytest.mark.slow

SAME = (
    *("loss/policy", "ratio/std", "kl/lambda", "kl/total", "kl/position", "gradient/norm", "matching/error"),
    *("optimizer/kl", "optimizer/kept", "optimizer/lr_factor", "optimizer/lr", "matching/moved"),
)
"""Metrics that do not depend on how clips are dealt out."""
CLIPS = c.BatchConfig(prompts=3, group_size=3, micro_batch=2)
"""Two ranks have 4 and 5 clips, and one group spans both."""
WITHOUT_SDE = {
    "kernel": KernelSpec(name="ode"),
    "surrogate": c.SurrogateConfig(equalize=False),
    "rollout": c.RolloutConfig(steps=4),
    "optimizer": c.OptimizerConfig(lr=1e-3, eps=1e-4),
}
RUNS = {
    # Ranks have different numbers of the best and the worst clips, which are dealt out to updates; weights are sharded and replicated.
    "dense": (
        "hunyuan15_t2v",
        4,
        ParallelSpec(sp=2, dp_replicate=2, timeout=60),
        {
            "batch": replace(CLIPS, micro_batch=1, trained_fraction=0.67),
            "update": c.UpdateConfig(updates_per_rollout=2, deal="clips"),
            "rewards": [
                RewardSpec(name="video_stats", weights={"brightness": 1.0, "saturation": 0.5}),
                RewardSpec(name="video_stats", label="watching", weights={"sharpness": 1.0}, metric_only=True),
            ],
        },
    ),
    # Both are trained, and prompts branch at steps of either.
    "experts": (
        "wan22_t2v",
        2,
        ParallelSpec(timeout=60),
        {
            "expert": "both",
            "lora": True,
            "kernel": KernelSpec(name="sage_exact", eta=1.4),
            "batch": CLIPS,
            "rollout": c.RolloutConfig(steps=4, same_noise=True, window=Window(kind="drawn", at=[1, 2])),
            "update": c.UpdateConfig(updates_per_rollout=2, repeat=True),
        },
    ),
    "sound": (
        "ltx2",
        2,
        ParallelSpec(timeout=60),
        {
            **WITHOUT_SDE,
            "guidance": 1.0,
            "lora": True,
            "iterations": 1,
            "batch": CLIPS,
            "objective": ObjectiveSpec(kind="nft", levels=2, draw="strata", old_decay=0.5),
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_layout_is_the_same_run(name: str, checkpoint, tmp_path) -> None:
    kind, ranks, spec, changes = RUNS[name]
    changes, expert = dict(changes), changes.get("expert", "high")
    changes.pop("expert", None)
    config = workers.configure(checkpoint(kind), tmp_path, **changes)
    config = replace(config, model=replace(config.model, expert=expert))
    alone = processes.alone(workers.train, config)
    assert {name.split(".")[0] for name in alone["state"] if "transformer_2" in name} or expert == "high"
    assert any(name.startswith("old/") for name in alone["state"]) == (config.objective.old_decay > 0)
    config = replace(config, parallel=spec)
    results = processes.run(workers.train, ranks, config, spec=spec)
    for result in results:
        assert isinstance(result, dict), result
        assert np.array_equal(result["rewards"], alone["rewards"])
        assert np.array_equal(result["advantages"], alone["advantages"])
        assert all(row.get("ratio/first_log", 0.0) == 0.0 for row in result["rows"])
    if config.kernel.name != "ode":  # else what is recorded is no noise
        places = set(itertools.chain.from_iterable(result["noise"] for result in results))
        assert places == alone["noise"].keys()
        for number, result in enumerate(results):
            sharing = results[number - number % spec.sp]
            assert result["noise"].keys() == sharing["noise"].keys(), "ranks that share a clip have its noise"
            assert all(np.array_equal(noise, alone["noise"][place]) for place, noise in result["noise"].items())
    scored = [place for result in results for place in result["real"].items()]
    assert sorted(place for place, _ in scored) == sorted(alone["real"]), "every clip is scored once"
    for place, value in scored:
        assert value == pytest.approx(alone["real"][place], rel=CLOSE)
    check_learning(results[0], alone)
    if name == "dense":  # groups have members on both ranks
        assert all(-1.0 <= row["reward/agreement/watching"] <= 1.0 for row in results[1]["rows"])
    check_metrics(results, alone)
    check_passes(results, config)


def check_learning(main, alone) -> None:
    assert len(main["gradients"]) == len(alone["gradients"]) > 1
    for gradients, expected in zip(main["gradients"], alone["gradients"]):
        assert gradients.keys() == expected.keys()
        error = sum(float(np.square(gradients[name] - expected[name]).sum()) for name in expected) ** 0.5
        size = sum(float(np.square(expected[name]).sum()) for name in expected) ** 0.5
        assert error < CLOSE * size
    assert main["state"].keys() == alone["state"].keys()
    for name, expected in alone["state"].items():
        assert np.abs(main["state"][name] - expected).max() < CLOSE, name


def check_metrics(results, alone) -> None:
    """Losses and norms, the same bits on all ranks and the same numbers as of one process."""
    for row, expected in zip(results[0]["rows"], alone["rows"]):
        assert row.keys() == expected.keys()
        for name in expected.keys() & SAME:
            assert row[name] == pytest.approx(expected[name], rel=CLOSE, abs=1e-12), name
    for other in results[1:]:
        for row, expected in zip(other["rows"], results[0]["rows"]):
            timeless = {name for name in row if not name.startswith("time/")}
            assert {name: row[name] for name in timeless} == {name: expected[name] for name in timeless}
        assert other["evaluation"] == results[0]["evaluation"]
    assert results[0]["evaluation"] == pytest.approx(alone["evaluation"], rel=CLOSE)


def check_passes(results, config: c.TrainConfig) -> None:
    """`sage-grpo plan` counts the passes of every rank: uneven shares, idle passes, fillers and split clips included."""
    said = forecast(config, find("cpu"), gpus=len(results), held_out=5)
    for number, result in enumerate(results):
        rank = number // config.parallel.sp
        row, evaluation = said.passes[rank], said.evaluation[rank]
        plain, gauge = row["shared"] + row["sampling"] + row["idle"] + row["reference"], row["gauge"]
        found = result["passes"]
        assert found["iteration"][True] == (row["replay"].forwards, row["replay"].clips)
        forwards, clips = found["iteration"][False]
        times = (forwards - plain.forwards) // gauge.forwards if gauge.forwards else 0  # again where max_kl acts
        assert 0 <= times <= TRIES
        assert times or not gauge.forwards
        assert (forwards, clips) == (plain.forwards + times * gauge.forwards, plain.clips + times * gauge.clips)
        assert found["evaluation"][False] == (evaluation.forwards, evaluation.clips)


def test_two_ranks_with_workers_are_two_ranks_without_and_decide_together(tmp_path) -> None:
    optimizer = c.OptimizerConfig(lr=1e-3, eps=1e-4)
    config = workers.configure(None, tmp_path, lora=True, batch=CLIPS, optimizer=optimizer)
    for result in processes.run(workers.train_beside_workers, 2, config):
        assert isinstance(result, dict), result
        (alone, weights, _), (rows, others, crew) = result["here"], result["workers"]
        assert rows == alone
        assert weights.keys() == others.keys()
        assert all(np.array_equal(weights[name], others[name]) for name in weights)
        figures = {"crew/workers": 4, "crew/gap": 0, "crew/staleness": 1}
        assert {name: crew[name] for name in figures} == figures
        assert "failed on lazy 1" in result["lazy"]
        assert "that wrong 1 sampled differs by" in result["wrong"]


KINDS = ("hunyuan15_i2v", "wan22_t2v", "wan22_5b_i2v")


def test_every_family_can_be_split(checkpoint) -> None:
    """Image-to-video, two experts (one of them frozen), a timestep per token; text of uneven length beside tokens. Every network
    sees a part of the tokens: one that saw all of them would be as right, and take twice as long."""
    checkpoints = {kind: str(checkpoint(kind)) for kind in KINDS}
    alone = processes.alone(workers.every_family, checkpoints)
    results = processes.run(workers.every_family, 2, checkpoints, spec=ParallelSpec(sp=2, timeout=60))
    for result in results:
        assert isinstance(result, dict), result
        for kind in KINDS:
            for level in ("high", "low"):
                np.testing.assert_allclose(result[kind][level], alone[kind][level], rtol=CLOSE, atol=CLOSE)
            assert result[kind]["norm"] == pytest.approx(alone[kind]["norm"], rel=CLOSE)
    for kind in KINDS:
        parts = zip(*(result[kind]["tokens"] for result in results))
        assert [sum(part) for part in parts] == alone[kind]["tokens"] != [], kind
