"""Every field of TrainConfig does what wiring_table.py says, and nothing before it in the line of data changes."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor
from wiring_table import ELSEWHERE, ROWS, changed

from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.kl_coefficient import KlCoefficient
from sage_grpo.training.trainer import Trainer
from sage_grpo.utils.video import write_mp4
from trainer_helpers import weights_of

ITERATIONS = 2
"""How many are watched."""


def leaf_fields(kind: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key that holds a value; items of lists as `rewards[].name`. A part that may be None is a key too."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType, list) else (hint,)
        inner = [one for one in options if isinstance(one, type) and dataclasses.is_dataclass(one)]
        if not inner or type(None) in options:
            yield prefix + field.name
        for part in inner:
            yield from leaf_fields(part, f"{prefix}{field.name}{'[]' if get_origin(hint) is list else ''}.")


def training(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The line of data through a few iterations, in the order in which one causes the next, computed as far as somebody looks.

    First the rollouts, rewards and advantages at the first weights; then of every optimizer update the gradient that reached the
    optimizer and the weights after it; last the weights that would be exported.
    """
    for iteration in range(ITERATIONS):
        plan = trainer.planner.plan(iteration, trainer.state.stream.take(trainer.config.batch.prompts))
        rollout = trainer.sample(plan)
        texts = [prompt.text for prompt in plan.prompts]
        yield "rollout", [texts, torch.cat([latents for _, latents in rollout.latents])]
        try:
            scored = trainer.engine.gather(trainer.engine.score(trainer.engine.decode(rollout), plan))
        except RewardFailure:
            yield "reward", "refused"
            return
        yield "reward", scored.total
        yield "advantage", trainer.advantages(scored, plan)
    trainer.state.stream.position = 0
    updates, step, params = [], trainer.state.optimizer.step, trainer.state.params

    def watched(update: int) -> float:
        updates.append(("gradient", {n: None if p.grad is None else p.grad.clone() for n, p in params.items()}))
        rate = step(update)
        updates.append(("weights", weights_of(trainer)))
        return rate

    trainer.state.optimizer.step = watched  # type: ignore[method-assign]
    for _ in range(ITERATIONS):
        trainer.step()
        yield from updates
        updates.clear()
    weights = params if trainer.state.ema is None else trainer.state.ema.copies
    yield "average", {name: p.detach().clone() for name, p in weights.items()}


def first_difference(left: Iterable[tuple[str, Any]], right: Iterable[tuple[str, Any]]) -> str:
    """The first phase in which two runs differ, and nothing after it is computed; empty where they are one."""
    for one, other in itertools.zip_longest(left, right):
        if one is None or other is None:
            return "gradient"  # one of them has more updates
        if one[0] != other[0] or not equal(one[1], other[1]):
            return one[0]
    return ""


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


KNOWN: dict[str, Any] = {}
"""What the base runs did: most rows share theirs."""


@pytest.fixture
def base(make_config, prompts: Path, tmp_path: Path) -> Callable[[str], tuple[TrainConfig, TrainConfig]]:
    def make(key: str) -> tuple[TrainConfig, TrainConfig]:
        row = ROWS[key]
        config = make_config(
            iterations=4,
            rewards=[
                RewardSpec(name="trainer_toys:two_parts", weights={"level": 1.0, "texture": 0.5}),
                RewardSpec(name="trainer_toys:bright", weights={"bright": 0.1}, options={"differentiable": True}),
            ],
            kl=KlCoefficient(lambda_min=0.1, lambda_max=1.0, warmup_updates=3),
        )
        config = changed(config, row.base)
        return config, changed(config, {key: _value(row.to, prompts, tmp_path)})

    return make


def _value(value: Any, prompts: Path, folder: Path) -> Any:
    if value == "OTHER_PROMPTS":
        file = folder / "other.txt"
        file.write_text("a fox\na house\nrain\n")
        return str(file)
    if value == "EXAMPLES":
        for name, grey in (("win", 200), ("lose", 50)):
            write_mp4(folder / f"{name}.mp4", torch.full((2, 8, 8, 3), grey, dtype=torch.uint8), 8.0)
        file = folder / "pairs.jsonl"
        file.write_text('{"prompt": "a cat", "win": "win.mp4", "lose": "lose.mp4"}')
        return str(file)
    return value


def test_every_field_has_a_row_or_a_place() -> None:
    elsewhere = {key: place for place, keys in ELSEWHERE.items() for key in keys.split()}
    assert all((Path(__file__).parents[1] / place).exists() for place in ELSEWHERE)
    fields = set(leaf_fields(TrainConfig))
    seen = {
        key for key in fields if key in elsewhere or any(key.startswith(part) for part in elsewhere if part[-1] == ".")
    }
    assert fields - seen == set(ROWS)


@pytest.mark.parametrize("key", ROWS)
def test_a_field_changes_its_phase_and_nothing_before_it(key: str, base) -> None:
    row, (config, other) = ROWS[key], base(key)
    known, changed_run = repr(dataclasses.replace(config, out="-")), assemble(other, build(other))
    if known not in KNOWN:
        trainer = assemble(config, build(config))
        KNOWN[known] = trainer.evaluate().metrics, training(trainer)
    figures, line = KNOWN[known]
    assert equal(figures, changed_run.evaluate().metrics) != row.evaluation
    kept, line = itertools.tee(line)
    KNOWN[known] = figures, kept
    assert first_difference(line, training(changed_run)) == row.changes
