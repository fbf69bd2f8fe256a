"""A long run holds no more at its end than after its first iterations; benchmarks/steady.py measures more of it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

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
