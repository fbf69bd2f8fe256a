"""Intervals over seeds against tabulated quantiles and simulated samples of known distributions."""

from __future__ import annotations

import math
import random

import pytest

from sage_grpo.utils.statistics import Z95, crossed_interval, holm, mean_interval, paired_interval, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 7: 2.3646, 30: 2.0423}
"""97.5% quantiles of Student's t by degrees of freedom, as printed in tables."""


def test_quantiles_are_those_of_the_tables_and_at_the_ends_cauchys_and_normal_ones() -> None:
    for freedom, value in TABLE.items():
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-5)
    for p in (0.5, 0.6, 0.75, 0.99):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), abs=1e-12, rel=1e-12)
    assert pytest.approx(1.959963984540054, abs=1e-12) == Z95
    assert t_quantile(0.975, 10_000) == pytest.approx(Z95, abs=3e-4)


def test_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, deviation sqrt(5/3), and t of 3 degrees of freedom."""
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.count) == (2.5, 4)
    assert found.half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, abs=1e-5)
    assert (found.low, found.high) == pytest.approx((2.5 - found.half, 2.5 + found.half))
    one = mean_interval([1.5])
    assert (one.mean, math.isnan(one.half)) == (1.5, True)
    assert mean_interval([]).count == 0


@pytest.mark.parametrize("count", [2, 5])
def test_95_of_100_intervals_hold_the_true_mean(count: int) -> None:
    """Within four standard errors: a true coverage of 95% is outside once in 16,000 times."""
    draw, samples = random.Random(count), 2000
    found = [mean_interval([draw.gauss(3, 0.7) for _ in range(count)]) for _ in range(samples)]
    hits = sum(abs(one.mean - 3) <= one.half for one in found)
    assert hits / samples == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / samples))


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


def test_the_p_value_is_of_both_sides_whatever_the_sign_and_certain_without_spread() -> None:
    """Gaps 1, 2, 3 have deviation 1: t = 2 sqrt 3, and two degrees of freedom have a closed form."""
    t = 2 * math.sqrt(3)
    for sign in (1.0, -1.0):
        found = paired_interval({seed: sign * seed for seed in (1, 2, 3)}, dict.fromkeys((1, 2, 3), 0.0))
        assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
        assert paired_interval({1: sign, 2: 1 + sign}, {1: 0.0, 2: 1.0}).p == 0.0
    assert paired_interval({1: 3.0, 2: 4.0}, {1: 3.0, 2: 4.0}).p == 1.0


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
    of_seeds_alone = mean_interval([sum(row) / prompts for row in table])
    assert found.half > 1.5 * of_seeds_alone.half
