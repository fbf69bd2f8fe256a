"""Intervals over seeds against tabulated quantiles and simulated samples of known distributions."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sage_grpo.tools.compare.summary import Cell, difference
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


PARTS = [(1.0, 0.0, 0.01), (0.0, 1.0, 0.01), (0.0, 0.0, 1.0), (0.3, 0.3, 1.0)]
"""Standard deviations of seeds, of prompts and of the rest: each alone, and together."""


@pytest.mark.parametrize("deviations", PARTS)
def test_95_of_100_intervals_over_seeds_and_prompts_hold_the_true_mean(
    deviations: tuple[float, float, float],
) -> None:
    """Every part counts, once, and with its own degrees of freedom. Where there is neither a seed's nor a prompt's part, theirs are still estimated, and
    the interval is a little long."""
    draws = 1500
    hits = sum(
        abs(crossed_interval(table).mean) <= crossed_interval(table).half for table in drawn(deviations, 8, 24, draws)
    )
    assert 0.935 < hits / draws < (0.965 if any(deviations[:2]) else 0.993)


def test_95_of_100_paired_differences_hold_the_true_one() -> None:
    """Arms share the prompts' parts and the seeds', and each has its own of both: pairing takes out the first and keeps the second."""
    draws, hits, shorter = 800, 0, 0
    shape = (4, 16, draws)
    shared, own = drawn((0.5, 1.0, 0.1), *shape), drawn((0.3, 0.3, 0.2), *shape)
    for common, extra in zip(shared, own):
        theirs = {seed: Cell(sum(row) / len(row), tuple(row)) for seed, row in enumerate(common)}
        rows = [[x + y + 1.0 for x, y in zip(*pair)] for pair in zip(common, extra)]
        ours = {seed: Cell(sum(row) / len(row), tuple(row)) for seed, row in enumerate(rows)}
        found = difference(ours, theirs)
        hits += found.low <= 1.0 <= found.high
        shorter += found.half < crossed_interval(rows).half
    assert 0.93 < hits / draws < 0.975
    assert shorter > 0.8 * draws


def drawn(deviations: tuple[float, float, float], seeds: int, prompts: int, count: int) -> list[list[list[float]]]:
    """Tables of scores by seed and prompt around a mean of 0."""
    generator = torch.Generator().manual_seed(round(100 * sum(deviations)) + seeds)
    shapes = ((seeds, 1), (1, prompts), (seeds, prompts))
    parts = [
        size * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        for size, shape in zip(deviations, shapes)
    ]
    tables: list[list[list[float]]] = sum(parts, torch.zeros(())).tolist()
    return tables


def test_an_interval_over_seeds_and_prompts_by_hand() -> None:
    """Two seeds, two prompts: 0, 2 / 4, 10. Mean squares 36, 16 and 4, so that the variance is (36 + 16 - 4) / 4 = 12."""
    found = crossed_interval([[0.0, 2.0], [4.0, 10.0]])
    assert (found.mean, found.count) == (4.0, 2)
    assert found.half == pytest.approx(t_quantile(0.975, 1) * math.sqrt(12))
    assert crossed_interval([[1.0, 2.0], [1.0, 2.0]]).half == pytest.approx(t_quantile(0.975, 1) * 0.5)
    assert crossed_interval([[1.0, 1.0], [1.0, 1.0]]).half == 0.0
