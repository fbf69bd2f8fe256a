"""Paired comparisons of held-out scores: the same prompts and noises every time, so differences clip by clip count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Column = Sequence[float | None]
"""The score of every clip; None where there is none."""
Scores = Mapping[str, Column]


@dataclass(frozen=True)
class Change:
    """A mean over clips before and after, pair by pair."""

    by: float
    stderr: float

    def surely(self, deviations: float) -> bool:
        """Whether it is an increase beyond chance."""
        return self.by > deviations * self.stderr and self.by > 0

    @property
    def sigmas(self) -> float:
        """In standard errors."""
        return self.by / self.stderr if self.stderr > 0 else math.copysign(math.inf, self.by) if self.by else 0.0


def change(before: Column, after: Column) -> Change:
    """Mean paired difference with its standard error, over the clips that have both scores; no pairs are no change."""
    return _mean([b - a for a, b in zip(before, after) if a is not None and b is not None])


def shortfall(total: Sequence[Column], witness: Sequence[Column]) -> Change:
    """How much less a witness gained than by its own rate so far; both at three times: at first, in between, and now.

    The rate is what it gained with the total at first. It is an estimate from the same clips, so it has its share in the scatter.
    """
    clips = [clip for clip in zip(*total, *witness) if None not in clip]
    early, late = [b - a for a, b, *_ in clips], [c - b for _, b, c, *_ in clips]
    if len(clips) < 2 or fmean(early) <= 0:
        return Change(0.0, math.inf)
    gained, gains = [b - a for *_, a, b, _ in clips], [c - b for *_, b, c in clips]
    rate, longer = fmean(gained) / fmean(early), fmean(late) / fmean(early)
    return _mean(
        [
            longer * (own - rate * step) + rate * next_step - gain
            for own, step, next_step, gain in zip(gained, early, late, gains)
        ]
    )


def _mean(numbers: Sequence[float]) -> Change:
    if len(numbers) < 2:
        return Change(fmean(numbers) if numbers else 0.0, math.inf)
    return Change(fmean(numbers), stdev(numbers) / math.sqrt(len(numbers)))


def by_prompt(column: Column, clips: int) -> list[float | None]:
    """Means over the clips of a prompt, which stand side by side: how a prompt fares is one observation, however many clips it has."""
    prompts = [finite(column[start : start + clips]) for start in range(0, len(column), clips)]
    return [fmean(scores) if scores else None for scores in prompts]


def weighted(scores: Scores, weights: Mapping[str, float]) -> list[float | None]:
    """The weighted sum of parts, clip by clip; None where one is missing."""
    columns = [scores[name] for name in weights]
    return [
        None
        if any(value is None for value in clip)
        else sum(weight * value for weight, value in zip(weights.values(), clip))
        for clip in zip(*columns)
    ]


def finite(column: Column) -> list[float]:
    """What was scored."""
    return [value for value in column if value is not None and math.isfinite(value)]
