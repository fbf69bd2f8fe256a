"""Small tools of the trainer tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sage_grpo.parallel import checkpoint
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Plan
from sage_grpo.training.trainer import Trainer


def plan_of(trainer: Trainer, iteration: int = 0) -> Plan:
    """The plan of an iteration, over the prompts that come next."""
    return trainer.planner.plan(iteration, trainer.state.stream.peek(trainer.config.batch.prompts))


def steps_of(trainer: Trainer, iteration: int = 0) -> list[list[int]]:
    """The trained steps of an iteration, one list per update."""
    return [list(part) for part in plan_of(trainer, iteration).groups[0].trained]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the trainable weights."""
    return {name: p.detach().clone() for name, p in trainer.state.params.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def resume(trainer: Trainer, root: Path) -> None:
    """Continue from the newest checkpoint, which must be there."""
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
    first.writer.finish()
    second = make_trainer(config)
    resume(second, root)
    for _ in range(2):
        second.step()
    assert same(weights_of(whole), weights_of(second))
