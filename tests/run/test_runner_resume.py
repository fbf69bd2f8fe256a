"""Interrupted and continued runs equal uninterrupted ones to the bit; damaged and foreign checkpoints are told apart; nothing piles up."""

from __future__ import annotations

import errno
import functools
import gc
import os
import re
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_grpo.cli import train as command
from sage_grpo.cli.main import main
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.checkpoint import CheckpointError
from sage_grpo.distributed.world import World
from sage_grpo.models.spec import LoraSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.run.session import run as train
from sage_grpo.training.config import AnchorConfig, DataConfig, KeepConfig, LogConfig, OptimizerConfig, TrainConfig
from sage_grpo.training.events import Hooks, IterationEvent
from sage_grpo.training.kl_coefficient import KlCoefficient
from trainer_helpers import assert_same_run, interrupt, rows


@pytest.fixture
def full(make_config, tmp_path: Path) -> TrainConfig:
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


def test_a_run_is_continued_as_asked_from_what_fits_and_is_whole(full: TrainConfig) -> None:
    with pytest.raises(FileNotFoundError, match="no usable checkpoint"):
        train(replace(full, resume="must"))
    interrupt(full, at=8)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        train(replace(full, resume="never"))
    for change in ({"trust_region": TrustRegion(mode="none")}, {"optimizer": OptimizerConfig(lr=1e-2, ema=None)}):
        with pytest.raises(CheckpointError, match=r"does not fit this configuration.*choose another `out`"):
            train(replace(full, **change, allow_changes=["trust_region", "optimizer"]))
    before = rows(full)
    for number in (2, 4):
        flip_a_bit(newest(full, number))
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match=r"every checkpoint.*damaged"):
        train(full)
    assert rows(full) == before


def live_tensors() -> dict[int, weakref.ref[torch.Tensor]]:
    """Tensors that Python knows of, by their address."""
    gc.collect()
    return {id(one): weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}


@pytest.mark.slow
def test_no_tensor_is_left_behind(make_config, prompts: Path, tmp_path: Path) -> None:
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
    before, counts = live_tensors(), []

    def count(event: IterationEvent) -> None:  # tensors from before the run may die at any time
        counts.append(sum(key not in before or before[key]() is not ref() for key, ref in live_tensors().items()))

    train(config, hooks=Hooks(iteration=count), quiet=True)
    assert len(set(counts[1:])) == 1, counts


FULL = OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def full_disk(first: int) -> Iterator[None]:
    """Tensors of checkpoints from number `first` on do not fit on the disk; torch reports it with its BaseException."""
    write = checkpoint.HuggingFaceStorageWriter.write_data

    def limited(self, plan, planner):
        if int(re.search(r"\.(\d+)\.partial", str(self.path))[1]) >= first:
            raise FULL
        return write(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.HuggingFaceStorageWriter, "write_data", limited)
        yield


def saved(config: TrainConfig) -> list[str]:
    return sorted(folder.name for folder in (Path(config.out) / "checkpoints").iterdir())


def test_a_failed_save_stops_the_run_with_status_1(make_config, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(iterations=3)
    with full_disk(2):
        assert command.run(config) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "sage-grpo train stopped: Checkpoint 2 could not be written" in said
    assert "No space left on device" in said
    assert "Done" not in said
    assert saved(config) == ["000001"]  # and nothing half-written takes up room
    assert command.run(config) == 0
    assert "at iteration 1." in capsys.readouterr().out
    assert saved(config) == ["000002", "000003"]


@pytest.mark.parametrize(("step", "stands"), [("write_data", 1), ("_put_in_place", 2)])
def test_a_second_interrupt_during_a_save_ends_the_run_and_loses_no_checkpoint(
    step: str, stands: int, make_config, monkeypatch, capsys
) -> None:
    config = make_config(iterations=1)
    train(config)

    def interrupt(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    longer = replace(config, iterations=2)
    holder = checkpoint.HuggingFaceStorageWriter if step == "write_data" else checkpoint
    monkeypatch.setattr("sage_grpo.cli.main._run", lambda *words: command.run(longer))
    with monkeypatch.context() as patch:
        patch.setattr(holder, step, interrupt)
        assert main(["train"]) == 130
    said = capsys.readouterr()
    assert "sage-grpo: Interrupted while a checkpoint was saved" in said.err
    assert "Traceback" not in said.err
    assert main(["train"]) == 0
    assert f"at iteration {stands}." in capsys.readouterr().out
    assert saved(config) == ["000001", "000002"]


def write(root: Path, number: int, value: float) -> None:
    checkpoint.save(root, number, {"w": torch.full((3,), value)}, {"value": value})


def read(root: Path) -> float:
    folder = checkpoint.newest_good(root)
    assert folder is not None
    tensors = {"w": torch.zeros(3)}
    checkpoint.load(folder, tensors, World())
    assert checkpoint.read_meta(folder)["value"] == tensors["w"][0]
    return float(tensors["w"][0])


@pytest.mark.parametrize("moment", range(3))
def test_a_kill_while_a_number_is_saved_again_loses_nothing(moment: int, tmp_path: Path, monkeypatch) -> None:
    """Kills before and after every step that changes what the folder holds."""
    write(tmp_path, 4, 1.0)
    steps = 0

    def step(original, *arguments, **named):
        nonlocal steps
        steps += 1
        if steps == moment + 1:
            raise KeyboardInterrupt
        return original(*arguments, **named)

    with monkeypatch.context() as patch:
        for module, name in ((os, "replace"), (checkpoint.shutil, "rmtree")):
            patch.setattr(module, name, functools.partial(step, getattr(module, name)))
        with pytest.raises(KeyboardInterrupt) if moment < 2 else nullcontext():
            write(tmp_path, 4, 2.0)
    assert steps == min(moment + 1, 2)  # both steps were tried
    checkpoint.recover(tmp_path)
    assert read(tmp_path) == 2.0
    write(tmp_path, 5, 3.0)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["000004", "000005"]  # leftovers are gone
    assert read(tmp_path) == 3.0


def test_prune_removes_only_what_it_wrote(tmp_path: Path) -> None:
    for number in range(1, 5):
        write(tmp_path, number, float(number))
    for name in ("2024-backup", "0001", "000001.copy", "1e6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("")
    (tmp_path / "000001" / "notes.txt").write_text("the good one")
    (tmp_path / "000000").symlink_to(tmp_path / "2024-backup", target_is_directory=True)
    checkpoint.prune(tmp_path, 2, newest=4)
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    theirs = {"2024-backup/precious", "0001/precious", "000001.copy/precious", "1e6/precious", "000001/notes.txt"}
    assert {file for file in left if not file.startswith(("000003/", "000004/"))} == theirs
    assert read(tmp_path) == 4.0
