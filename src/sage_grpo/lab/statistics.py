"""Means over seeds with their intervals, and paired differences; nothing but the standard library.

Seeds are independent draws of one distribution that is taken to be near normal: the mean of n of them has a t interval with n - 1
degrees of freedom. Arms with the same seeds share prompts and noise, so that their differences are compared seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sage_grpo.student import t_cdf, t_quantile

LEVEL = 0.95
"""Coverage of all intervals."""


@dataclass(frozen=True)
class Interval:
    """A mean and its interval; one value alone has none (NaN)."""

    mean: float
    half: float
    """Half of the interval's length: the mean lies in mean ± half."""
    count: int
    """Seeds."""

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval is on one side of 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired(Interval):
    """The mean of differences over the seeds that both arms have."""

    p: float
    """Two-sided p of no difference, for this pair alone."""


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean and t interval over seeds."""
    if not values:
        return Interval(math.nan, math.nan, 0)
    return Interval(statistics.fmean(values), _half(values, level), len(values))


def paired_interval(ours: Mapping[int, float], theirs: Mapping[int, float], level: float = LEVEL) -> Paired:
    """Ours minus theirs, over the seeds (keys) that both have."""
    seeds = sorted(set(ours) & set(theirs))
    gaps = [ours[seed] - theirs[seed] for seed in seeds]
    if not gaps:
        return Paired(math.nan, math.nan, 0, math.nan)
    return Paired(statistics.fmean(gaps), _half(gaps, level), len(gaps), _p_value(gaps))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjustment: with these, the chance that any of the true "no difference" is called one is at most the level.

    NaN (too few seeds) is no test and counts as none.
    """
    tests = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted, largest = dict.fromkeys(p_values, math.nan), 0.0
    for place, (p, name) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - place) * p))  # never below that of a smaller p
        adjusted[name] = largest
    return adjusted


def _half(values: Sequence[float], level: float) -> float:
    if len(values) < 2:
        return math.nan
    return t_quantile(0.5 + level / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _p_value(gaps: Sequence[float]) -> float:
    if len(gaps) < 2:
        return math.nan
    mean, spread = statistics.fmean(gaps), statistics.stdev(gaps)
    if spread == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * (1 - t_cdf(abs(mean) / spread * math.sqrt(len(gaps)), len(gaps) - 1))
