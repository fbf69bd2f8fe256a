"""Statistics of the study against published values and closed forms."""

from __future__ import annotations

import math

import pytest

from sage_grpo.tools.study.results import krippendorff_alpha, to_text, wilson, win_rate


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_has_newcombes_values(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe (1998), table I, method 3."""
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilsons_interval_ends_where_the_score_test_does() -> None:
    for end in wilson(7, 31):
        assert abs(7 / 31 - end) / math.sqrt(end * (1 - end) / 31) == pytest.approx(1.959963984540054)
    with pytest.raises(ValueError, match="3 successes in 2 trials"):
        wilson(3, 2)


def test_ties_are_stated_and_left_out_of_the_rate() -> None:
    found = win_rate(6, 10, 2)
    low, high = wilson(6, 8)
    assert found == {"wins": 6, "ties": 10, "losses": 2, "rate": 0.75, "low": low, "high": high}
    assert win_rate(0, 5, 0)["rate"] is None


N = None
MISSING = [  # Krippendorff (2011), "Computing Krippendorff's alpha-reliability", example C: four observers, twelve units
    [1, 2, 3, 3, 2, 1, 4, 1, 2, N, N, N],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, N, 3],
    [N, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, N],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, N],
]
TWO = [[0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]]  # his example A
THREE = [
    [N, N, N, N, N, 3, 4, 1, 2, 1, 1, 3, 3, N, 3],
    [1, N, 2, 1, 3, 3, 4, 3, N, N, N, N, N, N, N],
    [N, N, 2, 1, 3, 4, 4, N, 2, 1, 1, 3, 3, N, 4],
]


@pytest.mark.parametrize(("data", "alpha"), [(MISSING, 0.743), (TWO, 0.095), (THREE, 0.691)])
def test_alpha_has_krippendorffs_values(data: list[list[int | None]], alpha: float) -> None:
    units = [[value for value in unit if value is not None] for unit in zip(*data)]
    assert krippendorff_alpha(units) == pytest.approx(alpha, abs=5e-4)


def test_alpha_is_one_for_agreement_and_undefined_without_any_choice() -> None:
    assert krippendorff_alpha([["a", "a"], ["b", "b", "b"]]) == 1
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) is None
    assert krippendorff_alpha([["a"], ["b"]]) is None
    assert krippendorff_alpha([["a", "b"], ["b", "a"]]) < 0


def test_the_table_of_results_says_what_was_found() -> None:
    pair = {"first": "a", "second": "bb", "rate": 0.75, "low": 0.301, "high": 0.954, "wins": 3, "ties": 1, "losses": 10}
    none = {**pair, "second": "c", "rate": None, "low": None, "high": None}
    part = {"name": "quality", "pairs": [pair, none], "agreement": 0.256}
    empty = {"name": "motion", "pairs": [], "agreement": None}
    known = {"title": "T", "votes": 3, "voters": 2, "prompts": 4, "flagged": [2, 5], "excluded": []}
    found = {**known, "dimensions": [part, empty]}
    lines = [line.replace("|", "").split() for line in to_text(found).replace("\u2212", "-").splitlines()]
    assert lines[0] == ["T:", "3", "votes", "of", "2", "raters", "on", "4", "prompts"]
    assert ["a", "vs", "bb", "75.0%", "30.1%", "to", "95.4%", "3", "1", "10"] in lines
    assert ["a", "vs", "c", "-", "-", "3", "1", "10"] in lines
    assert [line[-1] for line in lines if line[:1] == ["agreement"]] == ["0.26", "-"]
    assert "rater 2, rater 5 (counted" in to_text(found)
    assert "(left out)" in to_text({**found, "excluded": [2, 5]})
    assert "flagged" not in to_text({**found, "flagged": []})
