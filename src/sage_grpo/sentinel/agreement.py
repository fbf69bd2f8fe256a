"""Whether what is trained on and what only watches prefer the same clips of a group: free, because both score every clip anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sage_grpo.sentinel.parting import AGREEMENT, STDERR


def agreements(
    total: Tensor, parts: Mapping[str, Tensor], groups: Tensor, witnesses: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """For every witness the mean over groups of the rank correlation of its score with the total, and the standard error of that mean.

    Members of a group differ in their noise alone, so this is what a step along the total does to the witness: between groups prompts
    differ, which no step changes. A witness without any group in which both tell clips apart has no agreement.
    """
    metrics = {}
    for title, weights in witnesses.items():
        score = torch.stack([weight * parts[name].double() for name, weight in weights.items()]).sum(0)
        pairs = [correlation(total[groups == g].double(), score[groups == g]) for g in groups.unique()]
        found = [pair for pair in pairs if pair is not None]
        if found:
            metrics[AGREEMENT + title], metrics[STDERR + title] = _mean(found)
    return metrics


def correlation(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """Rank correlation, and its variance if there were none (exact for ranks in any order); None where one of the two is constant."""
    both = torch.isfinite(a) & torch.isfinite(b)
    a, b = _ranks(a[both]), _ranks(b[both])
    size = float(a.square().sum() * b.square().sum())
    if not size:
        return None
    return float((a * b).sum()) / math.sqrt(size), 1.0 / (len(a) - 1)


def _ranks(x: Tensor) -> Tensor:
    """Centred ranks; equals share theirs."""
    return 0.5 * torch.sign(x[:, None] - x[None, :]).sum(1)


def _mean(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard error: the scatter from group to group, but not less than chance alone has."""
    values, count = [value for value, _ in found], len(found)
    mean = sum(values) / count
    chance = sum(variance for _, variance in found) / count
    scatter = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    return mean, math.sqrt(max(chance, scatter) / count)
