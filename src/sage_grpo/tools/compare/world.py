"""What is known about the worlds: how far scores can go there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sage_grpo.tools.compare.design import Column
from sage_grpo.training.config import TrainConfig
from sage_grpo.worlds.world import SHAPES, WORLDS, World

PARTS = (Column(key="TA"), Column(key="MQ"), Column(key="VQ"), Column(key="drift", higher=False))


def ceiling(weights: Mapping[str, float], world: World = SHAPES) -> float | None:
    """The best total for the judge's parts with these weights; None where it was not measured for one of them."""
    if not set(weights) <= set(world.ceiling):
        return None
    return sum(weight * world.ceiling[part] for part, weight in weights.items())


def columns_of(configs: Sequence[TrainConfig]) -> tuple[Column, ...]:
    """The total; with its ceiling, and the judge's parts, where one world's judge alone rewards all of them alike."""
    rewards = [config.rewards for config in configs]
    names = {tuple(reward.name for reward in each) for each in rewards}
    world = WORLDS.get(next(iter(names))[0]) if len(names) == 1 and all(len(each) == 1 for each in rewards) else None
    if world is None:
        return (Column(key="total", label="Overall"),)
    weights = [each[0].weights for each in rewards]
    same = all(each == weights[0] for each in weights)
    return (Column(key="total", label="Overall", ceiling=ceiling(weights[0], world) if same else None), *PARTS)
