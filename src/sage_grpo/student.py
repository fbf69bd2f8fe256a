"""Student's t distribution, for every interval that is printed; nothing but the standard library."""

from __future__ import annotations

import math
from functools import cache


def t_cdf(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t: half of the regularised incomplete beta function is the tail."""
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return tail if t < 0 else 1 - tail


@cache
def t_quantile(p: float, freedom: float) -> float:
    """The value below which T lies with probability p; by bisection, to the last digits."""
    if not 0 < p < 1 or freedom <= 0:
        raise ValueError(f"A quantile needs 0 < p < 1 and degrees of freedom above 0, got p {p} and {freedom}.")
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by the continued fraction that converges quickly left of the mean, and by symmetry right of it."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d1 / (1 + d2 / (1 + ...))) with the coefficients of the incomplete beta function, from the inside out."""
    value = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + even / (1 + odd / value)
    first = -(a + b) * x / (a + 1)
    return 1 / (1 + first / value)
