"""Significance of changes: held-out scores compared clip by clip (the same prompts and noises every time), and
agreements within groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev, variance
from typing import Any, NamedTuple

from sage_grpo.health.checks import Row, values

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


FALLEN = 5.0
"""Standard errors by which a part must be below its best. On recorded runs (research/benchmarks/results/parts_cpu.jsonl) this
found every part that was lost and no other; with 4 it also found one that recovered."""
FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5
"""The same for held-out prompts: FELL warns at once, FELL_TWICE if it holds at two evaluations in a row, and from
NEARLY on a rollback may not use the weights. With nine parts that only scatter, one of 30 runs with 16 evaluations has a
warning, and none an action; at 3.25 at once it would be two of five."""


class RewardParts:
    """The best mean of each part of the trained reward over `window` iterations, with its squared standard error.

    A part may be lost while the total looks harmless: once all clips of a group are equal in a respect, no advantage
    depends on it, and a policy does not regain it by itself (research/results/samplers.md).
    """

    def __init__(self, weights: Mapping[str, float], window: int) -> None:
        self.weights, self.window = {part: weight for part, weight in weights.items() if weight}, window
        self.best: dict[str, tuple[float, float]] = {}
        self.held_out: dict[str, Column] = {}
        """Scores of every part by prompt at its best evaluation, with the sign of its weight."""
        self.low: list[str] = []
        """Parts that were low at the last evaluation."""
        self.falling = False
        self.rows = 0

    def of(self, row: Row) -> list[str]:
        """Metrics of a row that are parts of the total, or their parts; empty if there is only one."""
        names = [name for name in row if self._weight(name)]
        return names if len(names) > 1 else []

    def observe(self, recent: Sequence[Row]) -> str:
        """Add the newest row, the last of `recent`; returns a text on parts far below their best, or an empty one."""
        self.rows += 1
        if len(recent) < self.window:
            return ""
        fallen = []
        for name in self.of(recent[-1]):
            own = values(recent[-self.window :], name)
            if len(own) < self.window:
                continue
            sign = math.copysign(1.0, self._weight(name))
            now, doubt = sign * fmean(own), variance(own) / len(own)
            best = self.best.get(name)
            if best is not None and best[0] - now > FALLEN * math.sqrt(doubt + best[1]):
                fallen.append(f"{name} is {sign * now:.3g}, it was {sign * best[0]:.3g} at its best")
            if self.rows % self.window == 0 and (best is None or now > best[0]):
                self.best[name] = now, doubt
        return "; ".join(fallen)

    def evaluated(self, scores: Scores, per_prompt: int) -> str:
        """The same for an evaluation with `per_prompt` adjacent clips of each prompt."""
        names = [name for name in scores if self._weight(f"reward/{name}")]
        fallen, low, self.falling = [], [], False
        for name in names if len(names) > 1 else []:
            sign = math.copysign(1.0, self._weight(f"reward/{name}"))
            now = [None if value is None else sign * value for value in by_prompt(scores[name], per_prompt)]
            best = self.held_out.get(name)
            if best is not None:
                lost = change(now, best)
                self.falling |= lost.surely(NEARLY)
                low += [name] * lost.surely(FELL_TWICE)
                if lost.surely(FELL) or (name in low and name in self.low):
                    was = sign * fmean(finite(best))
                    fallen.append(f"{name} is {lost.by:.3g} +- {lost.stderr:.2g} below its best, {was:.3g}")
            if finite(now) and (best is None or change(best, now).by > 0):
                self.held_out[name] = now
        self.low = low
        return "; ".join(fallen)

    def _weight(self, name: str) -> float:
        """Weight of the reward part that a metric belongs to; 0 if none."""
        if not name.startswith("reward/"):
            return 0.0
        whole = name.removeprefix("reward/")
        while whole and whole not in self.weights:
            whole = whole.rpartition("/")[0]
        return self.weights.get(whole, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": {name: list(best) for name, best in self.best.items()},
            "rows": self.rows,
            "held_out": {name: list(column) for name, column in self.held_out.items()},
            "low": list(self.low),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = {name: (mean, doubt) for name, (mean, doubt) in state["best"].items()}
        self.rows, self.held_out, self.low = int(state["rows"]), dict(state["held_out"]), list(state["low"])
