"""What is known about the shapes world: how far scores can go there."""

from __future__ import annotations

from collections.abc import Sequence

from sage_grpo.lab.design import Column
from sage_grpo.train.config import TrainConfig

CEILING = {"TA": 0.9863, "MQ": 0.9834, "VQ": 0.8847}
"""What the judge gives perfect clips of held-out scenes after the miniature's VAE, which no model on it can pass: printed by
`sage-grpo shapes ceiling --prompts 512`. With weights 1, 0.5, 0.5 the total is 1.920."""
PARTS = (Column(key="TA"), Column(key="MQ"), Column(key="VQ"), Column(key="drift", higher=False))


def ceiling(weights: dict[str, float]) -> float:
    """The best total for the judge's parts with these weights."""
    return sum(weight * CEILING[part] for part, weight in weights.items())


def columns_of(configs: Sequence[TrainConfig]) -> tuple[Column, ...]:
    """The total; with its ceiling, and the judge's parts, where the shapes judge alone rewards all of them alike."""
    weights = [config.rewards[0].weights for config in configs if [r.name for r in config.rewards] == ["shapes"]]
    if len(weights) < len(configs):
        return (Column(key="total", label="Overall"),)
    same = all(each == weights[0] for each in weights) and set(weights[0]) <= set(CEILING)
    return (Column(key="total", label="Overall", ceiling=ceiling(weights[0]) if same else None), *PARTS)
