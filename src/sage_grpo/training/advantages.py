"""Advantages of a rollout's clips from their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_grpo.objectives.advantage import decoupled_advantage, group_advantage
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.training.config import AdvantageConfig, TrainConfig
from sage_grpo.training.loss import StatePart
from sage_grpo.training.scoring import Scores


def advantages_of(config: TrainConfig, reward: CompositeReward, parts: Sequence[StatePart], scores: Scores) -> Tensor:
    """Group-relative advantages of all clips; one column per part if rewards judge parts."""
    if not any(spec.judges for spec in config.rewards):
        return _normalized(config.advantage, scores, reward.weights, scores.total)
    columns = []
    for part in parts:
        weights = reward.judging(part.name)
        total = torch.stack([weight * scores.parts[name] for name, weight in weights.items()] or [scores.total * 0])
        columns.append(_normalized(config.advantage, scores, weights, total.sum(0)))
    return torch.stack(columns, dim=1)


def _normalized(config: AdvantageConfig, scores: Scores, weights: Mapping[str, float], total: Tensor) -> Tensor:
    if config.decoupled and weights:
        return decoupled_advantage(
            scores.parts, weights, scores.groups, valid=scores.valid, scale=config.scale, clip=config.clip
        )
    return group_advantage(total, scores.groups, valid=scores.valid, scale=config.scale, clip=config.clip)
