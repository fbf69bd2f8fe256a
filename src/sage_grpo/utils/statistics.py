"""Means with their intervals, paired differences, and Student's t, with the standard library alone.

Values (seeds, prompts) are independent draws of one distribution that is taken to be near normal: the mean of n of them has a t interval with n - 1
degrees of freedom. Scores by seed and prompt have two kinds of draws (`crossed_interval`). Arms with the same seeds share prompts and noise, so that
their differences are compared seed by seed.

Not scipy: nothing else here needs it, it would add 100 MB to an installation, and Student's t is thirty lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.95
"""Coverage of all intervals."""
Z95 = statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Half of a normal interval's length in standard errors, for many values or for a share."""


@dataclass(frozen=True)
class Interval:
    """A mean and its interval; one value alone has none (NaN)."""

    mean: float
    half: float
    """Half of the interval's length: the mean lies in mean ± half."""
    count: int
    """Seeds."""
    p: float = math.nan
    """Two-sided p of a mean of 0, such as no difference, for this mean alone."""

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def mean_interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, math.nan, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    return _interval(statistics.fmean(values), error, len(values), len(values) - 1)


def paired_interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    """The mean of differences over the seeds that both arms have."""
    seeds = sorted(set(ours) & set(theirs))
    return mean_interval([ours[seed] - theirs[seed] for seed in seeds])


def _interval(mean: float, error: float, count: int, freedom: int) -> Interval:
    """The t interval of a mean with this standard error, and the chance of one this far from 0, of either sign, if 0 is the truth."""
    p = 2 * (1 - t_cdf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Interval(mean, t_quantile(0.5 + LEVEL / 2, freedom) * error, count, p)


def crossed_interval(values: Sequence[Sequence[float]]) -> Interval:
    """Mean over seeds (rows) and prompts (columns) of scores or of differences, with an interval for other seeds and other prompts.

    All seeds see the same prompts, so that a mean over seeds alone has an interval for these prompts only. Seeds and prompts are crossed random
    effects (docs/method.md, "Intervals"): the variances of the three parts by their mean squares, and degrees of freedom by Satterthwaite.
    """
    seeds, prompts = len(values), len(values[0]) if values else 0
    if not prompts:
        return Interval(math.nan, math.nan, 0)
    by_seed = [statistics.fmean(row) for row in values]
    mean = statistics.fmean(by_seed)
    if seeds < 2 or prompts < 2:
        return Interval(mean, math.nan, seeds)
    by_prompt = [statistics.fmean(column) for column in zip(*values)]
    residuals = [x - a - b + mean for row, a in zip(values, by_seed) for x, b in zip(row, by_prompt)]
    free = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    rest = sum(x * x for x in residuals) / free[2] / (seeds * prompts)
    of_seeds, of_prompts = statistics.variance(by_seed) / seeds, statistics.variance(by_prompt) / prompts
    variance = max(of_seeds - rest, 0.0) + max(of_prompts - rest, 0.0) + rest  # both have the rest's share in them
    spread = sum(part * part / n for part, n in zip((of_seeds, of_prompts, rest), free))
    freedom = round(variance * variance / spread) if spread else 0
    return _interval(mean, math.sqrt(variance), seeds, max(1, freedom))


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


def t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t, by its finite sums (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    within = math.sin(angle) * total
    return 0.5 + ((angle + within) / math.pi if odd else within / 2)


@cache
def t_quantile(p: float, freedom: int) -> float:
    """The value below which T lies with probability p, from 0.5 to below 1; by bisection, to the last digits."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2
