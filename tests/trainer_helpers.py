"""Small tools of the trainer tests."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer_toys
from sage_grpo.cli.train import run as command
from sage_grpo.distributed import checkpoint
from sage_grpo.recipes.methods import METHODS
from sage_grpo.run.session import run as train
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Plan
from sage_grpo.training.trainer import Trainer


def plan_of(trainer: Trainer, iteration: int = 0) -> Plan:
    return trainer.planner.plan(iteration, trainer.state.stream.peek(trainer.config.batch.prompts))


def steps_of(trainer: Trainer, iteration: int = 0) -> list[list[int]]:
    return [list(part) for part in plan_of(trainer, iteration).groups[0].trained]


def of_method(method: str, config: TrainConfig) -> TrainConfig:
    """This method's settings on `config`, whose rewards are functions of torch: those that need their gradients have them."""
    rewards = [replace(one, options={"differentiable": True}) for one in config.rewards]
    return METHODS[method](replace(config, rewards=rewards))


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.state.params.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def watch_gradients(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """A list that gets the gradients of every optimizer update, before the optimizer uses them."""
    found: list[dict[str, torch.Tensor]] = []
    apply = trainer.updater.apply

    def noted(metrics: dict[str, float]) -> dict[str, float]:
        found.append({name: p.grad.clone() for name, p in trainer.state.params.items() if p.grad is not None})
        return apply(metrics)

    trainer.updater.apply = noted
    return found


def watch_updates(trainer: Trainer) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    found: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    gradients = watch_gradients(trainer)
    apply = trainer.updater.apply

    def noted(metrics: dict[str, float]) -> dict[str, float]:
        weights = weights_of(trainer)
        result = apply(metrics)
        found.append((weights, gradients[-1]))
        return result

    trainer.updater.apply = noted
    return found


def watch_starts(trainer: Trainer) -> list[torch.Tensor]:
    """A list that gets the states of every pass at sigma 1: where clips start."""
    starts: list[torch.Tensor] = []
    velocity = trainer.model.velocity

    def noted(x: torch.Tensor, sigma: torch.Tensor, conditions: Any, **options: Any) -> torch.Tensor:
        if float(sigma) == 1:
            starts.append(x)
        return velocity(x, sigma, conditions, **options)

    trainer.model.velocity = noted
    return starts


def assert_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float) -> None:
    kept = {name: one.double() for name, one in wanted.items() if one is not None}
    norm = math.sqrt(sum(float(one.square().sum()) for one in kept.values()))
    gap = math.sqrt(sum(float((found[name].double() - one).square().sum()) for name, one in kept.items()))
    assert norm > 0
    assert gap < rtol * norm, gap / norm


def resume(trainer: Trainer, root: Path) -> None:
    folder = checkpoint.newest_good(root)
    assert folder is not None
    trainer.state.load(folder, trainer.world)


def assert_resumes_to_the_bit(make_trainer: Callable[[TrainConfig], Trainer], config: TrainConfig, root: Path) -> None:
    """Four iterations in one go, and two, a checkpoint and two more, end with the same weights."""
    whole, first = make_trainer(config), make_trainer(config)
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    first.save(root)
    second = make_trainer(config)
    resume(second, root)
    for _ in range(2):
        second.step()
    assert same(weights_of(whole), weights_of(second))


def rows(config: TrainConfig) -> list[dict]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def final(config: TrainConfig) -> dict[str, torch.Tensor]:
    files = sorted((Path(config.out) / "final").rglob("*.safetensors"))
    assert files
    return {f"{file.name}/{name}": t for file in files for name, t in load_file(file).items()}


def assert_same_run(one: TrainConfig, other: TrainConfig) -> None:
    assert rows(one) == rows(other)
    left, right = final(one), final(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def interrupt(config: TrainConfig, at: int, how: str = "crashes") -> int | None:
    """Run until reward call number `at`, which ends the process's work in the middle of an iteration (or signals it)."""
    trainer_toys.CALLS["count"] = 0
    config = replace(config, rewards=[replace(reward, try_out=False) for reward in config.rewards])
    with pytest.MonkeyPatch.context() as patch:
        act, bright = getattr(trainer_toys, how), trainer_toys.bright

        @functools.wraps(bright)
        def disturbed(videos, prompts, fps):
            return act(videos, prompts, fps, at, bright)

        patch.setattr(trainer_toys, "bright", disturbed)
        if how == "signals":
            return command(config)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    return None
