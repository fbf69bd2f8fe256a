"""The estimates of `sage-grpo probe`, as pure functions of rewards: sources of their variance, and the settings that follow.

Members of a branch come in quadruples with the noises e, -e, f, -f, where f = c e + sqrt(1 - c²) g with g independent of e. Each of
them is standard normal by itself. Half of the difference of an opposite pair is the odd part of the reward, and the product of
the odd parts of e and f has the mean c V1 + c³ V3 + ..., where Vk is the variance of degree k (Hermite) in the noise. Divided by
c it is V1, the variance that is linear in the noise, and a part c² or less of what is cubic or higher. The gradient of a policy
step sees V1 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

QUADRUPLE = 4
CORRELATION = 0.5
"""c: smaller admits less of the cubic part and makes the estimate noisier."""
LEAST = 0.1
"""Steps whose noise makes a smaller share of the variance are not worth branching at: there is little to gain."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effects of exploring: shares of the reward's variance over clips with start noises of their own, and changes of means."""

    start: Estimate
    """Share that comes from the start noise."""
    explored: Estimate
    """Share that comes from the exploration noise, linear or not."""
    linear: Estimate
    """R: the linear share of the exploration noise's part."""
    std: Estimate
    reward: Estimate
    """Mean reward minus that of the deterministic clips from the same start noises."""
    drift: Estimate | None
    """The same of the reward part named drift; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended settings."""

    steps: list[int]
    weights: list[float]
    eta: float
    eta_is_safe: bool
    """False: every eta costs reward or adds drift, and this is the smallest that was tried."""


def split_variance(rewards: Tensor) -> dict[str, Tensor]:
    """Unbiased variance components of rewards of shape (prompts, starts, members), one value per prompt.

    `start`: of the mean reward of a start noise, over start noises; `explored`: within a branch; `linear`: V1 of it.
    """
    prompts, starts, members = rewards.shape
    if starts < 2 or members % QUADRUPLE or members < 2 * QUADRUPLE:
        raise ValueError(f"Need 2 starts and 8, 12, 16, ... members, got {starts} starts and {members} members.")
    # No component depends on a branch's level; without it rounding stays small.
    level = rewards.double().mean(2, keepdim=True)
    own = (rewards.double() - level).view(prompts, starts, -1, 2, 2)
    odd = (own[..., 0] - own[..., 1]) / 2
    even = (own[..., 0] + own[..., 1]) / 2
    quads = even.mean(-1)
    count = quads.shape[2]
    # Quadruples of a branch are independent: products of two different ones have the squared mean as their expectation.
    square = (quads.sum(2).square() - quads.square().sum(2)) / (count * (count - 1))
    between = level.squeeze(2).var(1) - (quads.var(2) / count).mean(1)
    return {
        "start": between,
        "explored": odd.square().mean((1, 2, 3)) + (even.square().mean((2, 3)) - square).mean(1),
        "linear": (odd[..., 0] * odd[..., 1]).mean((1, 2)) / CORRELATION,
    }


def bootstrap(
    rows: Tensor, statistic: Callable[[Tensor], Tensor], *, level: float = 0.95, draws: int = 4000, seed: int = 0
) -> Estimate:
    """A statistic of the mean of rows, with its interval when rows (prompts) are drawn anew. `statistic` maps (draws, columns) to (draws,).
    Deviations are stretched by sqrt(n / (n - 1)): a resample of n rows has that much too little spread."""
    count, rows = len(rows), rows.double()
    value = float(statistic(rows.mean(0, keepdim=True))[0])
    picked = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
    drawn = statistic(rows[picked].mean(1))
    ends = torch.quantile(drawn, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=drawn.dtype))
    low, high = (value + math.sqrt(count / (count - 1)) * (float(end) - value) for end in ends)
    return Estimate(value=value, low=low, high=high)


def effect(rewards: Tensor, still: Tensor, drifts: Tensor | None = None, still_drifts: Tensor | None = None) -> Effect:
    """Compare clips that explored, of shape (prompts, starts, members), with deterministic ones, of shape (prompts, starts). A prompt with a clip
    that has no reward is left out."""
    whole = rewards.isfinite().all(2).all(1) & still.isfinite().all(1)
    if int(whole.sum()) < 2:
        raise ValueError(
            f"Only {int(whole.sum())} of {len(whole)} prompts have a reward for every clip, and 2 are needed: fix the reward or "
            "raise probe.prompts."
        )
    parts = split_variance(rewards[whole])
    rows = torch.stack([parts["start"], parts["explored"], parts["linear"]], 1)
    if not float(rows[:, :2].clamp(min=0).mean(0).sum()) > 0:
        raise ValueError(
            "The reward is the same for all clips of a prompt: there is nothing to learn from, or to probe."
        )

    def share(column: int) -> Estimate:
        return bootstrap(rows, lambda means: _shares(means)[:, column])

    def change(ours: Tensor, theirs: Tensor) -> Estimate:
        return bootstrap((ours[whole].mean(2) - theirs[whole]).mean(1, keepdim=True), lambda m: m[:, 0])

    return Effect(
        start=share(0),
        explored=share(1),
        linear=share(2),
        std=bootstrap(rows, lambda m: m[:, 1].clamp(min=0).sqrt()),
        reward=change(rewards, still),
        drift=None if drifts is None or still_drifts is None else change(drifts, still_drifts),
    )


def _shares(means: Tensor) -> Tensor:
    """Start and exploration over their sum, the linear part over the exploration's; estimates of variances may fall below 0."""
    parts = torch.cat([means[:, :2].clamp(min=0), means[:, 2:]], 1)
    start, explored = parts[:, 0], parts[:, 1]
    both = (start + explored).clamp(min=1e-30)
    return torch.stack([start / both, explored / both, parts[:, 2] / explored.clamp(min=1e-30)], 1)


def spread(still: Tensor) -> float:
    """Standard deviation over start noises of deterministic clips, of shape (prompts, starts), root mean square over prompts."""
    return math.sqrt(float(still.double().var(1).nanmean()))


def best_step(steps: Sequence[tuple[int, Effect]]) -> int:
    """The step with the largest R among those that move the reward; among all where none does."""
    moving = [row for row in steps if row[1].explored.value >= LEAST] or steps
    return max(moving, key=lambda row: row[1].linear.value)[0]


def advise(
    steps: Sequence[tuple[int, Effect]],
    etas: Sequence[tuple[float, Effect]],
    *,
    loss: float = 0.0,
    drift: float = 0.0,
    most: int = 3,
) -> Advice:
    """Branch where R is largest, and at steps beside it with at least half of that, drawn in proportion to sqrt(R).

    Steps whose interval reaches 0 are left out. The eta is the largest at which neither the whole interval of the reward's change
    lies below -loss nor that of the drift's change above `drift`.
    """
    best = best_step(steps)
    known = {step: row.linear.value for step, row in steps if row.explored.value >= LEAST and row.linear.low > 0}
    order = [step for step, _ in steps]
    chosen = [(best, known[best])] if best in known else []
    for side in (order[order.index(best) + 1 :], order[: order.index(best)][::-1]):
        beside = takewhile(lambda step: 2 * known.get(step, 0.0) >= known.get(best, math.inf), side)
        chosen += [(step, known[step]) for step in beside]
    chosen = sorted(sorted(chosen, key=lambda row: -row[1])[:most])
    roots = [math.sqrt(value) for _, value in chosen]
    safe = [eta for eta, row in etas if row.reward.high >= -loss and (row.drift is None or row.drift.low <= drift)]
    return Advice(
        steps=[step for step, _ in chosen],
        weights=[round(root / sum(roots), 4) for root in roots],
        eta=max(safe, default=min(eta for eta, _ in etas)),
        eta_is_safe=bool(safe),
    )
