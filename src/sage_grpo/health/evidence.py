"""Significance of changes: held-out scores compared clip by clip (the same prompts and noises every time), and
agreements within groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

from sage_grpo.health.checks import Row

Column = Sequence[float | None]
"""The score of every clip; None if missing."""
Scores = Mapping[str, Column]


@dataclass(frozen=True)
class ScoreChange:
    """A mean over clips before and after, pair by pair."""

    by: float
    stderr: float

    def surely(self, deviations: float) -> bool:
        """True if it is an increase beyond chance."""
        return self.by > deviations * self.stderr and self.by > 0

    @property
    def sigmas(self) -> float:
        """In standard errors."""
        return self.by / self.stderr if self.stderr > 0 else math.copysign(math.inf, self.by) if self.by else 0.0


def change(before: Column, after: Column) -> ScoreChange:
    """Mean paired difference with its standard error, over the clips that have both scores; no pairs are no change."""
    return _mean([b - a for a, b in zip(before, after) if a is not None and b is not None])


def shortfall(total: Sequence[Column], witness: Sequence[Column]) -> ScoreChange:
    """Shortfall of a held-out reward's gain against its earlier rate (its first gain relative to the total's); both
    columns at three times: first, in between, and now. The rate's error is part of the scatter."""
    clips = [clip for clip in zip(*total, *witness) if None not in clip]
    early, late = [b - a for a, b, *_ in clips], [c - b for _, b, c, *_ in clips]
    if len(clips) < 2 or fmean(early) <= 0:
        return ScoreChange(0.0, math.inf)
    gained, gains = [b - a for *_, a, b, _ in clips], [c - b for *_, b, c in clips]
    rate, longer = fmean(gained) / fmean(early), fmean(late) / fmean(early)
    columns = zip(gained, early, late, gains)
    return _mean([longer * (first - rate * step) + rate * later - gain for first, step, later, gain in columns])


def _mean(numbers: Sequence[float]) -> ScoreChange:
    if len(numbers) < 2:
        return ScoreChange(fmean(numbers) if numbers else 0.0, math.inf)
    return ScoreChange(fmean(numbers), stdev(numbers) / math.sqrt(len(numbers)))


def by_prompt(column: Column, clips: int) -> list[float | None]:
    """Means over the clips of a prompt, which are adjacent: a prompt is one observation, however many clips it has."""
    prompts = [finite(column[start : start + clips]) for start in range(0, len(column), clips)]
    return [fmean(scores) if scores else None for scores in prompts]


def weighted(scores: Scores, weights: Mapping[str, float]) -> list[float | None]:
    """The weighted sum of parts, clip by clip; None where one is missing."""
    clips = zip(*(scores[name] for name in weights))
    return [None if None in clip else sum(map(operator.mul, weights.values(), clip)) for clip in clips]


def finite(column: Column) -> list[float]:
    return [value for value in column if value is not None and math.isfinite(value)]


AGREEMENT = "reward/agreement/"
STDERR = "reward/agreement_stderr/"


class Agreement(NamedTuple):
    """Agreement of a held-out reward with the total on the clips of a group, summed over some iterations."""

    iterations: int = 0
    total: float = 0.0
    variance: float = 0.0

    def plus(self, other: Agreement, times: int = 1) -> Agreement:
        """Sum of both; `times` -1 subtracts those of an earlier time."""
        return Agreement(
            self.iterations + times * other.iterations,
            self.total + times * other.total,
            self.variance + times * other.variance,
        )

    @property
    def mean(self) -> float:
        return self.total / max(1, self.iterations)

    @property
    def stderr(self) -> float:
        """Its standard error; every iteration has other prompts and noises."""
        return math.sqrt(max(0.0, self.variance)) / max(1, self.iterations)

    def to(self, later: Agreement) -> ScoreChange | None:
        """Its drop since; None if one of the two has no iteration."""
        if not self.iterations or not later.iterations:
            return None
        return ScoreChange(self.mean - later.mean, math.hypot(self.stderr, later.stderr))


@dataclass(frozen=True)
class PastEvaluation:
    """The sentinel's record of an evaluation."""

    scores: Mapping[str, Column]
    agreement: Mapping[str, Agreement] = field(default_factory=dict)
    """Of the iterations until then."""


def agreement_of(row: Row, title: str) -> Agreement:
    mean, stderr = row.get(AGREEMENT + title), row.get(STDERR + title)
    return Agreement() if mean is None or stderr is None else Agreement(1, mean, stderr**2)


def evidence(held_out: ScoreChange, drop: ScoreChange | None) -> float:
    """Combined evidence in standard errors of held-out clips and of training's groups, which share no clip; or of the
    first alone."""
    return held_out.sigmas if drop is None else (held_out.sigmas + drop.sigmas) / math.sqrt(2)
