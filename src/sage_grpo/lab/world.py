"""What is known about the shapes world: how far scores can go there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sage_grpo.lab.design import Column
from sage_grpo.training.config import TrainConfig

CEILING = {"TA": 0.98672, "MQ": 0.9834, "VQ": 0.88154}
"""What the judge gives perfect clips of the held-out prompts after the miniature's VAE: `sage-grpo shapes ceiling --prompts 128`
(benchmarks/results/ceiling.json)."""
PARTS = (Column(key="TA"), Column(key="MQ"), Column(key="VQ"), Column(key="drift", higher=False))


def ceiling(weights: Mapping[str, float]) -> float:
    """The best total for the judge's parts with these weights."""
    return sum(weight * CEILING[part] for part, weight in weights.items())


def columns_of(configs: Sequence[TrainConfig]) -> tuple[Column, ...]:
    """The total; with its ceiling, and the judge's parts, where the shapes judge alone rewards all of them alike."""
    weights = [config.rewards[0].weights for config in configs if [r.name for r in config.rewards] == ["shapes"]]
    if len(weights) < len(configs):
        return (Column(key="total", label="Overall"),)
    same = all(each == weights[0] for each in weights) and set(weights[0]) <= set(CEILING)
    return (Column(key="total", label="Overall", ceiling=ceiling(weights[0]) if same else None), *PARTS)
