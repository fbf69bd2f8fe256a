"""Interrupted and continued runs equal uninterrupted ones to the bit; damaged and foreign checkpoints are told apart; nothing piles up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sage_grpo.models.spec import LoraSpec
from sage_grpo.parallel.checkpoint import CheckpointError
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.session import run as train
from sage_grpo.training.config import AnchorConfig, DataConfig, KeepConfig, LogConfig, OptimizerConfig, TrainConfig
from trainer_helpers import assert_same_run, interrupt, rows


@pytest.fixture
def full(make_config, tmp_path: Path) -> TrainConfig:
    """Every kind of state in use."""
    return make_config(
        out=str(tmp_path / "whole"),
        iterations=5,
        trust_region=TrustRegion(mode="dual"),
        anchor=AnchorConfig(every=3),
        kl=KlCoefficient(kind="ppo", lambda_min=1e-3, lambda_max=1.0, warmup_updates=2, target=1e-9),
        optimizer=OptimizerConfig(lr=1e-2, ema=0.9, warmup_updates=3, decay="cosine"),
        keep=KeepConfig(checkpoint_every=2, videos_every=0),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon computes in bfloat16, which not every CPU has
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_twice_is_the_same_run(optimizer: str, full: TrainConfig, tmp_path: Path) -> None:
    full = replace(full, optimizer=replace(full.optimizer, kind=optimizer))
    broken = replace(full, out=str(tmp_path / "broken"))
    train(full)
    interrupt(broken, at=2)  # in the first iteration: nothing saved yet (call 1 is the evaluation)
    interrupt(broken, at=6)  # after the checkpoint of iteration 2
    train(broken)
    assert_same_run(full, broken)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_resume_is_exact_on_a_real_architecture(lora: LoraSpec | None, make_config, tmp_path: Path) -> None:
    whole = make_config(
        kind="wan_t2v", model={"lora": lora}, rollout={"steps": 3}, iterations=2, out=str(tmp_path / "whole"),
        optimizer=OptimizerConfig(lr=1e-2),
    )  # fmt: skip
    broken = replace(whole, out=str(tmp_path / "broken"))
    train(whole)
    interrupt(broken, at=3)
    train(broken)
    assert_same_run(whole, broken)


def test_sigterm_saves_exits_with_0_and_the_same_command_continues(full: TrainConfig, tmp_path: Path) -> None:
    stopped = replace(full, out=str(tmp_path / "stopped"))
    train(full)
    assert interrupt(stopped, at=2, how="signals") == 0
    # Iteration 1 is no multiple of checkpoint_every, so this checkpoint is the signal's.
    assert [folder.name for folder in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["000001"]
    assert not (tmp_path / "stopped" / "final").exists()
    train(stopped)
    assert_same_run(full, stopped)


def newest(config: TrainConfig, number: int) -> Path:
    (file,) = (Path(config.out) / "checkpoints" / f"{number:06d}").glob("*.safetensors")
    return file


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(full: TrainConfig, tmp_path: Path) -> None:
    hurt = replace(full, out=str(tmp_path / "hurt"))
    train(full)
    interrupt(hurt, at=8)  # in iteration 5 (evaluations before 1, after 2 and after 4): checkpoints 2 and 4 are there
    flip_a_bit(newest(hurt, 4))
    with pytest.warns(UserWarning, match=r"000004 is damaged .*using the one before it"):
        train(hurt)
    assert_same_run(full, hurt)


def test_when_all_checkpoints_are_damaged_the_run_says_so_and_keeps_what_is_there(full: TrainConfig) -> None:
    interrupt(full, at=8)
    before = rows(full)
    for number in (2, 4):
        flip_a_bit(newest(full, number))
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match=r"every checkpoint.*damaged"):
        train(full)
    assert rows(full) == before


def test_a_checkpoint_of_another_kind_of_run_does_not_fit_even_if_asked_for(full: TrainConfig) -> None:
    interrupt(full, at=6)
    for change in ({"trust_region": TrustRegion(mode="none")}, {"optimizer": OptimizerConfig(lr=1e-2, ema=None)}):
        with pytest.raises(CheckpointError, match=r"does not fit this configuration.*choose another `out`"):
            train(replace(full, **change, allow_changes=["trust_region", "optimizer"]))


def test_resume_must_and_never(full: TrainConfig) -> None:
    with pytest.raises(FileNotFoundError, match="no usable checkpoint"):
        train(replace(full, resume="must"))
    interrupt(full, at=6)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        train(replace(full, resume="never"))
    train(replace(full, resume="must"))


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
