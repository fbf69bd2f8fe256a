"""What a configuration does, phase by phase, on the toy model: so that two configurations can be compared."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from sage_grpo.rewards.member import RewardFailure
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer

ITERATIONS = 3
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


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration with other values; `rewards[].name` changes the first reward's."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(part: Any, path: list[str], value: Any) -> Any:
    name = path[0].removesuffix("[]")
    if len(path) > 1 and path[0].endswith("[]"):
        first, *rest = getattr(part, name)
        value = [_changed(first, path[1:], value), *rest]
    elif len(path) > 1:
        value = _changed(getattr(part, name), path[1:], value)
    return dataclasses.replace(part, **{name: value})


def trainer_of(config: TrainConfig) -> Trainer:
    """The trainer that a configuration describes."""
    return Trainer(config, build(config))


class Line:
    """The line of data of a run, phase by phase, computed as far as somebody looks and kept for the next who does."""

    def __init__(self, phases: Iterator[tuple[str, Any]]) -> None:
        self._seen: list[tuple[str, Any]] = []
        self._rest = phases

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for place in itertools.count():
            if place == len(self._seen):
                following = next(self._rest, None)
                if following is None:
                    return
                self._seen.append(following)
            yield self._seen[place]


def training(config: TrainConfig) -> Line:
    """The line of data through a few iterations, in the order in which one causes the next.

    First the rollouts, rewards and advantages at the first weights; then of every optimizer update the gradient that reached the
    optimizer and the weights after it; last the weights that would be exported.
    """
    return Line(_phases(config))


def _phases(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    trainer = trainer_of(config)
    for iteration in range(ITERATIONS):
        plan = trainer.planner.plan(iteration, trainer.state.stream.take(config.batch.prompts))
        rollout = trainer.roll_out(plan)
        texts = [prompt.text for prompt in plan.prompts]
        yield "rollout", [texts, torch.cat([latents for _, latents in rollout.latents])]
        try:
            scored = trainer.studio.score(trainer.studio.decode(rollout), plan)
        except RewardFailure:
            yield "reward", "refused"
            return
        yield "reward", scored.total
        yield "advantage", trainer.advantages(scored)
    trainer.state.stream.position = 0
    updates = _watch(trainer)
    for _ in range(ITERATIONS):
        trainer.step()
        yield from updates
        updates.clear()
    weights = trainer.state.params if trainer.state.ema is None else trainer.state.ema.copies
    yield "average", {name: p.detach().clone() for name, p in weights.items()}


def _watch(trainer: Trainer) -> list[tuple[str, Any]]:
    """A list that every optimizer update adds its gradient and its weights to."""
    step, params, line = trainer.state.optimizer.step, trainer.state.params, []

    def watched(update: int) -> float:
        line.append(("gradient", {n: None if p.grad is None else p.grad.clone() for n, p in params.items()}))
        rate = step(update)
        line.append(("weights", {name: p.detach().clone() for name, p in params.items()}))
        return rate

    trainer.state.optimizer.step = watched  # type: ignore[method-assign]
    return line


def evaluation(config: TrainConfig) -> dict[str, float]:
    """The figures of an evaluation before training."""
    return trainer_of(config).evaluate().metrics


def first_difference(left: Iterable[tuple[str, Any]], right: Iterable[tuple[str, Any]]) -> str:
    """The first phase in which two runs differ, and nothing after it is computed; empty where they are one."""
    for one, other in itertools.zip_longest(left, right):
        if one is None or other is None:
            return "gradient"  # one of them has more updates
        if one[0] != other[0] or not equal(one[1], other[1]):
            return one[0]
    return ""


def equal(left: Any, right: Any) -> bool:
    """Equal to the bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
