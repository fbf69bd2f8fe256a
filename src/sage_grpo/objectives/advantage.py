"""Group-relative advantages, with failed clips masked out rather than scored 0; and the selection of a group's clips for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sage_grpo.config.ranges import Positive, checked

Scale = Literal["group", "global", "none"]


@checked
class AdvantageConfig:
    """Advantages from rewards."""

    scale: Scale = "group"
    """Divide by the standard deviation of the group, of all groups together (global), or of none."""
    decoupled: bool = False
    """Normalize each reward in its group before summing (GDPO)."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; None is no limit."""


def group_advantage(
    rewards: Tensor,
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    scale: Scale = "group",
    eps: float = 1e-6,
    clip: float | None = None,
) -> Tensor:
    """A_i = (r_i - mean of its group) / (population std + eps), one value per clip; `groups` holds an integer per clip.

    Clips that are not valid, or whose reward is not finite, count in no statistic and get advantage 0. `scale` divides by the
    group's std, by that of the raw rewards of all groups together (global), or not at all.
    """
    ids, index = torch.unique(groups, return_inverse=True)
    ok = torch.isfinite(rewards) if valid is None else torch.isfinite(rewards) & valid.bool()
    if not bool(ok.any()):
        raise ValueError(
            f"None of the {len(rewards)} rewards is valid and finite, so there is nothing to learn from. "
            "Look at the reward's error message; a failed reward is masked, never scored 0."
        )
    count = _group_sum(ok.to(torch.float64), index, len(ids))
    # float64: the mean of equal float32 values is then exact, so a group without spread gives exactly 0.
    r = torch.where(ok, rewards.to(torch.float64), 0.0)
    mean = _group_sum(r, index, len(count)) / count.clamp(min=1)
    centred = torch.where(ok, r - mean[index], 0.0)
    variance = _group_sum(centred.square(), index, len(count)) / count.clamp(min=1)
    if scale == "group":
        advantage = centred / (variance.sqrt()[index] + eps)
    elif scale == "global":
        around = torch.where(ok, r - r.sum() / ok.sum(), 0.0)
        advantage = centred / ((around.square().sum() / ok.sum()).sqrt() + eps)
    else:
        advantage = centred
    if clip is not None:
        advantage = advantage.clamp(-clip, clip)
    return advantage.to(torch.float32)


def decoupled_advantage(
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    groups: Tensor,
    *,
    valid: Tensor | None = None,
    scale: Scale = "group",
    eps: float = 1e-6,
    clip: float | None = None,
) -> Tensor:
    """GDPO (arXiv 2601.05242): normalize every reward in its group, add them up, and normalize the sum over the batch."""
    missing = sorted(set(weights) - set(parts))
    if missing or not weights:
        raise ValueError(f"weights name rewards that were not computed: {missing}; there are {sorted(parts)}.")
    ok = torch.stack([torch.isfinite(parts[name]) for name in weights]).all(0)
    ok = ok if valid is None else ok & valid
    terms = [w * group_advantage(parts[name], groups, valid=ok, scale=scale, eps=eps) for name, w in weights.items()]
    total = torch.stack(terms).sum(0)  # 0 where masked, and its mean over the batch is 0
    total = total / ((total.square().sum() / ok.sum()).sqrt() + eps)
    return total if clip is None else total.clamp(-clip, clip)


def _group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def _ranked(advantage: Sequence[float], valid: Sequence[bool]) -> list[int]:
    """Places of the valid clips, the worst first; of equal clips the first counts as the worse one, so that every rank chooses alike."""
    return sorted((place for place, ok in enumerate(valid) if ok), key=lambda place: advantage[place])


def best(advantage: Sequence[float], valid: Sequence[bool], count: int) -> list[int]:
    """Places of the `count` best valid clips; none where all are equally good. A single clip was given as a good one."""
    order = _ranked(advantage, valid)
    if len(order) > 1:
        order = [place for place in order if advantage[place] > advantage[order[0]]]
    return sorted(order[-count:])


def best_against_worst(advantage: Sequence[float], valid: Sequence[bool], count: int) -> list[tuple[int, int]]:
    """Up to `count` pairs of places: the best clip with the worst, the second best with the second worst, and so on, where one is better."""
    order = _ranked(advantage, valid)
    pairs = zip(reversed(order), order[: min(count, len(order) // 2)])
    return [(better, worse) for better, worse in pairs if advantage[better] > advantage[worse]]


def best_and_worst(advantage: Sequence[float], valid: Sequence[bool], count: int) -> list[int]:
    """Places of the `count` best and worst clips, half each; of an odd number one more of the best. (DanceGRPO's best-of-n)"""
    order = _ranked(advantage, valid)
    worst = count // 2
    return sorted({*order[:worst], *order[worst - count :]})
