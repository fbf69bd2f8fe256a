"""A long run holds no more at its end than after its first iterations; benchmarks/steady.py measures more of it."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sage_grpo.models.spec import LoraSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import DataConfig, KeepConfig, LogConfig, OptimizerConfig


@pytest.fixture
def steady(benchmark_module) -> ModuleType:
    """The benchmark."""
    return benchmark_module("steady")


@pytest.mark.slow
def test_no_tensor_is_left_behind(steady, make_config, prompts: Path, tmp_path: Path) -> None:
    """With new prompts all the time, guidance, an anchor, an average, checkpoints, evaluations and videos."""
    many = tmp_path / "many.txt"
    many.write_text("".join(f"a cat, number {number}\n" for number in range(40)))
    config = make_config(
        kind="wan_t2v",
        model={"lora": LoraSpec(rank=2), "guidance_scale": 2.0, "cache": str(tmp_path / "cache")},
        rollout={"steps": 3},
        iterations=6,  # prompts are encoded for two at a time
        data=DataConfig(prompts=str(many), eval_prompts=str(prompts), encode_ahead=4),
        trust_region=TrustRegion(mode="dual"),
        optimizer=OptimizerConfig(lr=1e-3, ema=0.9),
        keep=KeepConfig(checkpoint_every=2, videos_every=3),
        log=LogConfig(tensorboard=True, progress=False),
    )
    counts = [row["tensors"] for row in steady.measure(config)]
    assert len(set(counts[1:])) == 1, counts


def test_a_drift_is_told_from_noise(steady) -> None:
    line = steady.slope([10.0, 3.0] + [5.0 + 0.5 * place for place in range(8)])
    assert line.per_iteration == pytest.approx(0.5)
    assert line.interval == pytest.approx(0.0, abs=1e-9)
    assert line.growth == pytest.approx(0.5 * 7 / 6.75)
    draw = random.Random(0)
    noise = [10 + draw.gauss(0, 1) for _ in range(50)]
    assert not steady.slope(noise).drifts(0.02)
    assert steady.slope([value + 0.2 * place for place, value in enumerate(noise)]).drifts(0.02)
    assert not steady.slope([20 - 0.1 * place for place in range(50)]).drifts(0.0)
    with pytest.raises(ValueError, match="at least 3 iterations, got 2"):
        steady.slope([1.0, 2.0])
    rows = [{"seconds": 1.0, "tensors": 100.0 + place} for place in range(10)]
    assert {name: bool(line["drifts"]) for name, line in steady.judge(rows).items()} == {
        "seconds": False,
        "tensors": True,
    }


@pytest.mark.slow
def test_what_was_there_before_a_run_is_not_the_runs(steady) -> None:
    old = [torch.zeros(2) for _ in range(3)]
    before = steady.live_tensors()
    event = SimpleNamespace(metrics={"time/total": 1.0})
    assert steady.sample(event, before)["tensors"] == 0
    kept = [torch.zeros(2) for _ in range(2)]
    assert steady.sample(event, before)["tensors"] == len(kept)
    del old[:]
    kept.append(torch.zeros(2))  # very likely where an old one was
    assert steady.sample(event, before)["tensors"] == len(kept)
