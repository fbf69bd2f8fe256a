"""Intervals over seeds against tabulated quantiles and simulated samples of known distributions."""

from __future__ import annotations

import math
import random

import pytest

from sage_grpo.statistics import Z95, crossed_interval, holm, mean_interval, paired_interval, t_cdf, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 7: 2.3646, 9: 2.2622, 15: 2.1314, 30: 2.0423, 120: 1.9799}
"""97.5% quantiles of Student's t by degrees of freedom, as printed in tables."""


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_quantiles_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-5)
    assert t_quantile(0.025, freedom) == pytest.approx(-value, abs=6e-5)


def test_quantiles_of_one_and_of_very_many_degrees_of_freedom_are_cauchys_and_normal_ones() -> None:
    for p in (0.01, 0.4, 0.5, 0.6, 0.75, 0.99):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), abs=1e-12, rel=1e-12)
    assert pytest.approx(1.959963984540054, abs=1e-12) == Z95
    assert t_quantile(0.975, 1e7) == pytest.approx(Z95, abs=1e-5)
    for p, freedom in ((0.0, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(ValueError, match="degrees of freedom above 0"):
            t_quantile(p, freedom)


@pytest.mark.parametrize("t", [-30.0, -2.5, -0.3, 0.0, 0.7, 4.0, 1e3])
def test_the_distribution_has_its_closed_forms(t: float) -> None:
    """One degree of freedom is Cauchy's distribution; two and four have polynomials in t / sqrt(freedom + t^2)."""
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)
    s = t / math.sqrt(4 + t * t)
    assert t_cdf(t, 4) == pytest.approx(0.5 + 0.25 * s * (3 - s * s), abs=1e-12)
    assert (t_cdf(math.inf, 3), t_cdf(-math.inf, 3)) == (1.0, 0.0)


def test_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, deviation sqrt(5/3), and t of 3 degrees of freedom."""
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.count) == (2.5, 4)
    assert found.half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, abs=1e-5)
    assert (found.low, found.high) == pytest.approx((2.5 - found.half, 2.5 + found.half))
    one = mean_interval([1.5])
    assert (one.mean, math.isnan(one.half)) == (1.5, True)
    assert mean_interval([]).count == 0


SAMPLES = 2000


def binomial_bounds(p: float, n: int) -> tuple[float, float]:
    """Four standard errors on either side: a true coverage of p is outside once in 16,000 times."""
    error = 4 * math.sqrt(p * (1 - p) / n)
    return p - error, p + error


@pytest.mark.parametrize("count", [2, 5])
def test_95_of_100_intervals_hold_the_true_mean(count: int) -> None:
    draw = random.Random(count)
    hits = sum(
        abs((found := mean_interval([draw.gauss(3, 0.7) for _ in range(count)])).mean - 3) <= found.half
        for _ in range(SAMPLES)
    )
    low, high = binomial_bounds(0.95, SAMPLES)
    assert low < hits / SAMPLES < high


def test_pairs_go_by_seed_and_not_by_the_order_in_which_runs_ended() -> None:
    """The gaps of the seeds are 0 and 3; by order, and by size, they would be 1 and 2: the same mean, another interval."""
    ours, theirs = {1: 5.0, 2: 7.0}, {2: 4.0, 1: 5.0}
    for one, other in ((ours, theirs), (dict(reversed(ours.items())), theirs), (ours, {9: 0.0, **theirs})):
        found = paired_interval(one, other)
        assert (found.mean, found.count) == (1.5, 2)
        assert found.half == pytest.approx(12.7062047 * 1.5, rel=1e-6)
        assert found.p == pytest.approx(0.5, abs=1e-9)


def test_holm_by_hand() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan})
    assert {name: found[name] for name in "abc"} == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert math.isnan(found["d"])
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_differences_without_spread_are_certain_and_none_is_none() -> None:
    for gap in (1.0, -1.0, 0.5):
        assert paired_interval({1: gap, 2: 1 + gap}, {1: 0.0, 2: 1.0}).p == 0.0
    assert paired_interval({1: 3.0, 2: 4.0}, {1: 3.0, 2: 4.0}).p == 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_p_value_is_of_both_sides_whatever_the_spread_and_the_sign(sign: float) -> None:
    """Gaps 1, 2, 3 have deviation 1: t = 2 sqrt 3, and two degrees of freedom have a closed form."""
    t = 2 * math.sqrt(3)
    found = paired_interval({seed: sign * seed for seed in (1, 2, 3)}, dict.fromkeys((1, 2, 3), 0.0))
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


@pytest.mark.parametrize("freedom", [3, 30, 1000])
def test_near_the_middle_the_distribution_is_a_line(freedom: float) -> None:
    """Its slope is the density at 0. Here the continued fraction is too slow, and the symmetry is needed."""
    density = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    assert t_cdf(1e-3, freedom) - 0.5 == pytest.approx(1e-3 * density, rel=1e-5)


def test_an_interval_over_seeds_and_prompts_is_that_of_a_bootstrap_over_both() -> None:
    """Rows and columns drawn again with replacement, 1,500 times; closed form with n for n - 1."""
    rng = random.Random(5)
    seeds, prompts = 12, 16
    of_seed = [rng.gauss(0, 0.3) for _ in range(seeds)]
    of_prompt = [rng.gauss(0, 0.8) for _ in range(prompts)]
    table = [[1.0 + a + b + rng.gauss(0, 0.5) for b in of_prompt] for a in of_seed]
    found = crossed_interval(table)
    assert found.mean == pytest.approx(sum(map(sum, table)) / (seeds * prompts))
    error = found.half / t_quantile(0.975, seeds - 1)
    means = []
    for _ in range(1500):
        rows = rng.choices(table, k=seeds)
        columns = rng.choices(range(prompts), k=prompts)
        means.append(sum(row[column] for row in rows for column in columns) / (seeds * prompts))
    middle = sum(means) / len(means)
    drawn = math.sqrt(sum((mean - middle) ** 2 for mean in means) / len(means))
    assert error == pytest.approx(drawn, rel=0.12)  # 4% by n - 1, the rest by 1,500 draws
    assert (
        found.half > mean_interval([sum(row) / prompts for row in table]).half * 1.5
    )  # seeds alone know nothing of other prompts
