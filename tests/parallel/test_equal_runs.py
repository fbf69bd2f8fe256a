"""One process, data parallel, sequence parallel and both are the same run.

Rewards here depend on (iteration, group, member) alone, so rewards, advantages and starting noise must be equal to the bit. All else are
sums in another order: each rank adds up its own samples (and, with sequence parallelism, its own tokens) first, and attention sees its keys
in another order. Workers compute in float64 (double.py), so that this costs fewer digits than any error would.
"""

from __future__ import annotations

import dataclasses
import itertools

import dist_workers as workers
import numpy as np
import processes
import pytest

from double import CLOSE
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import SentinelConfig

pytestmark = pytest.mark.slow

SAME = (
    *("loss/policy", "ratio/std", "kl/lambda", "kl/total", "kl/position", "gradient/norm"),
    *("optimizer/kl", "optimizer/kept", "optimizer/lr_factor", "optimizer/lr"),
)
"""Metrics that do not depend on how clips are dealt out."""
RUNS = [
    # checkpoint, LoRA, guidance (two forward passes for one backward pass), processes, sp, replicas
    ("hunyuan15_t2v", False, 1.0, 2, 1, 1),
    ("hunyuan15_t2v", False, 1.0, 4, 2, 1),
    ("hunyuan15_t2v", True, 2.0, 4, 1, 2),
    ("wan_t2v", False, 2.0, 2, 2, 1),
]


@pytest.fixture(scope="module")
def reference(checkpoint, tmp_path_factory):
    """(kind, lora, guidance) -> configuration and what one process does with it."""
    known = {}

    def get(kind: str, lora: bool, guidance: float):
        key = (kind, lora, guidance)
        if key not in known:
            folder = tmp_path_factory.mktemp("run")
            config = workers.configure(checkpoint(kind), folder, lora=lora, guidance=guidance)
            known[key] = config, processes.alone(workers.train, config)
        return known[key]

    return get


@pytest.mark.parametrize(("kind", "lora", "guidance", "ranks", "sp", "replicate"), RUNS)
def test_every_layout_is_the_same_run(kind, lora, guidance, ranks, sp, replicate, reference) -> None:
    config, alone = reference(kind, lora, guidance)
    spec = ParallelSpec(sp=sp, dp_replicate=replicate, timeout=60)
    results = processes.run(workers.train, ranks, dataclasses.replace(config, parallel=spec), spec=spec)
    for result in results:
        assert isinstance(result, dict), result
        assert np.array_equal(result["rewards"], alone["rewards"])
        assert np.array_equal(result["advantages"], alone["advantages"])
    check_noise(results, alone, sp)
    check_real_rewards(results, alone)
    check_learning(results[0], alone)
    check_metrics(results, alone)


def test_a_compiled_run_over_two_ranks_is_the_plain_run_of_one(reference) -> None:
    """FSDP, guidance, text of several lengths, a LoRA, and blocks that keep attention's outputs, all compiled."""
    config, alone = reference("hunyuan15_t2v", True, 2.0)
    spec = ParallelSpec(timeout=60)
    batch = dataclasses.replace(config.batch, micro_batch=1)  # every size of a batch takes another ten seconds to trace
    config = dataclasses.replace(config, parallel=spec, batch=batch)
    results = processes.run(workers.train_compiled, 2, config, spec=spec)
    for result in results:
        assert isinstance(result, dict), result
        assert np.array_equal(result["advantages"], alone["advantages"])
        assert all(row["ratio/first_log"] == 0.0 for row in result["rows"])
    check_learning(results[0], alone)


def check_noise(results, alone, sp: int) -> None:
    """Ranks that share a clip have the same noise; every clip is somewhere; all are those of one process."""
    for first in range(0, len(results), sp):
        for other in results[first : first + sp]:
            assert other["noise"].keys() == results[first]["noise"].keys()
    places = set(itertools.chain.from_iterable(result["noise"] for result in results))
    assert places == alone["noise"].keys()
    for result in results:
        for place, noise in result["noise"].items():
            assert np.array_equal(noise, alone["noise"][place])


def check_same_run(results, alone) -> None:
    """Rewards and the exact replay of every rank, what was learnt, and what was logged."""
    for result in results:
        assert isinstance(result, dict), result
        assert (result["rewards"] == alone["rewards"]).all()
        assert all(row["ratio/first_log"] == 0.0 for row in result["rows"])
    check_real_rewards(results, alone)
    check_learning(results[0], alone)
    check_metrics(results, alone)


def check_real_rewards(results, alone) -> None:
    """Every clip is scored exactly once, and to the same reward."""
    scored = [place for result in results for place in result["real"]]
    assert sorted(scored) == sorted(alone["real"])
    for result in results:
        for place, value in result["real"].items():
            assert value == pytest.approx(alone["real"][place], rel=CLOSE)


def check_learning(main, alone) -> None:
    """Gradients, weights, average and anchor."""
    assert len(main["gradients"]) == len(alone["gradients"]) == 4
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
        for name in SAME:
            assert row[name] == pytest.approx(expected[name], rel=CLOSE, abs=1e-12), name
    for other in results[1:]:
        for row, expected in zip(other["rows"], results[0]["rows"]):
            timeless = {name for name in row if not name.startswith("time/")}
            assert {name: row[name] for name in timeless} == {name: expected[name] for name in timeless}
        assert other["evaluation"] == results[0]["evaluation"]
    assert results[0]["evaluation"] == pytest.approx(alone["evaluation"], rel=CLOSE)


def test_all_ranks_go_back_together(checkpoint, tmp_path) -> None:
    """Without a word between them they find the same, remember the same and continue from the same weights."""
    spec = ParallelSpec(timeout=60)
    config = workers.configure(checkpoint("wan_t2v"), tmp_path, guidance=1.0, parallel=spec, iterations=4)
    watching = RewardSpec(name="video_stats", label="watching", weights={"sharpness": 1.0}, metric_only=True)
    config = dataclasses.replace(
        config,
        rewards=[*config.rewards, watching],
        sentinel=SentinelConfig(action="rollback"),
        evaluate=dataclasses.replace(config.evaluate, every=1),
    )
    first, second = processes.run(workers.go_back, 2, config, spec=spec)
    assert isinstance(first, dict), first
    assert first["said"] == [(2, "not_finite", "warn"), (2, "not_finite", "rollback")] == second["said"]
    assert first["memory"] == second["memory"]
    assert first["memory"]["brake"] == 0.5
    assert first["next"] == second["next"]
    assert -1.0 <= first["next"]["reward/agreement/watching"] <= 1.0  # groups have members on both ranks
    assert first["memory"]["agreement"]["watching"][0] == 1  # of the iteration that was kept
    for name, tensor in first["before"].items():
        assert np.array_equal(first["after"][name], tensor), name
    assert any(not np.array_equal(first["moved"][name], tensor) for name, tensor in first["before"].items())


@pytest.mark.parametrize(
    "kinds",
    [
        ("hunyuan15_i2v", "wan_i2v", "wan22_t2v", "wan22_5b_t2v", "wan22_5b_i2v", "qwen_image"),
        pytest.param(
            ("ltx", "ltx_condition", "flux", "flux2", "qwen_image_edit", "ltx2", "ltx2_3"), marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "slow"],
)
def test_every_family_can_be_split(kinds: tuple[str, ...], checkpoint) -> None:
    """Image-to-video, two experts (one of them frozen), a timestep per token; text of uneven length beside tokens, and sound."""
    checkpoints = {kind: str(checkpoint(kind)) for kind in kinds}
    alone = processes.alone(workers.every_family, checkpoints)
    for result in processes.run(workers.every_family, 2, checkpoints, spec=ParallelSpec(sp=2, timeout=60)):
        assert isinstance(result, dict), result
        for kind in kinds:
            for level in ("high", "low"):
                np.testing.assert_allclose(result[kind][level], alone[kind][level], rtol=CLOSE, atol=CLOSE)
            assert result[kind]["norm"] == pytest.approx(alone[kind]["norm"], rel=CLOSE)


@pytest.mark.parametrize(("tokens", "text", "heads", "sp"), [(8, 4, 2, 2), (7, 5, 6, 3), (5, 1, 2, 2)])
def test_split_attention_is_attention(tokens: int, text: int, heads: int, sp: int) -> None:
    """Also where tokens cannot be split evenly, and where a rank has no text at all."""
    alone = processes.alone(workers.attend, tokens, text, heads)
    spec = ParallelSpec(sp=sp, timeout=30)
    for result in processes.run(workers.attend, sp, tokens, text, heads, spec=spec):
        assert isinstance(result, dict), result
        np.testing.assert_allclose(result["y"], alone["y"], rtol=CLOSE, atol=CLOSE)
        np.testing.assert_allclose(result["gradients"], alone["gradients"], rtol=CLOSE, atol=CLOSE)
