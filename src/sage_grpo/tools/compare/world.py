"""The ceiling of the shapes world, and the columns of comparisons of its recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sage_grpo.tools.compare.design import Column
from sage_grpo.training.config import TrainConfig
from sage_grpo.worlds.world import SHAPES

PARTS = (Column(key="TA"), Column(key="MQ"), Column(key="VQ"), Column(key="drift", higher=False))


def ceiling(weights: Mapping[str, float]) -> float | None:
    """The best total for the judge's parts with these weights; None where it was not measured for one of them."""
    if not set(weights) <= set(SHAPES.ceiling):
        return None
    return sum(weight * SHAPES.ceiling[part] for part, weight in weights.items())


def columns_of(configs: Sequence[TrainConfig]) -> tuple[Column, ...]:
    """The total; with its ceiling, and the judge's parts, where the shapes judge alone rewards all of them alike."""
    if any([reward.name for reward in config.rewards] != [SHAPES.name] for config in configs):
        return (Column(key="total", label="Overall"),)
    weights = [config.rewards[0].weights for config in configs]
    same = all(each == weights[0] for each in weights)
    return (Column(key="total", label="Overall", ceiling=ceiling(weights[0]) if same else None), *PARTS)
