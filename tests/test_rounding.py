"""A printed figure is the true one, rounded once: laws of the helper, and pages whose figures are made from it."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sage_grpo.tools.compare import measure
from sage_grpo.tools.compare import report as lab_report
from sage_grpo.tools.study.results import to_text, win_rate
from sage_grpo.utils.statistics import Interval
from sage_grpo.utils.text import fixed, number, percent, plus_minus

FIGURES = st.floats(-1e12, 1e12, allow_nan=False)


@given(value=FIGURES, digits=st.integers(0, 6), signed=st.booleans(), grouped=st.booleans())
def test_a_printed_figure_is_the_true_one_rounded_once(value: float, digits: int, signed: bool, grouped: bool) -> None:
    printed = fixed(value, digits, signed=signed, grouped=grouped)
    assert len(printed.partition(".")[2]) == digits
    assert (printed[0] in "+-") or not signed
    shown, unit = Fraction(Decimal(printed.replace(",", ""))), Fraction(1, 10**digits)
    gap = shown - Fraction(value)
    assert abs(gap) <= unit / 2
    if abs(gap) == unit / 2:  # a half goes away from zero
        assert abs(shown) > abs(Fraction(value))


@pytest.mark.parametrize(
    ("value", "digits", "printed"),
    # what (value).toFixed(digits) is in a browser; Python's own format differs in the halves
    [(0.125, 2, "0.13"), (-0.125, 2, "-0.13"), (2.5, 0, "3"), (0.5, 0, "1"), (6.25, 1, "6.3"), (1.005, 2, "1.00"), (8.345, 2, "8.35"), (1e21, 0, "1000000000000000000000")],
)  # fmt: skip
def test_pages_of_python_and_of_scripts_round_alike(value: float, digits: int, printed: str) -> None:
    assert fixed(value, digits) == printed


def test_shares_by_hand() -> None:
    assert (percent(0.0144), percent(0.125), percent(-0.125, 0), percent(0.0625, 1)) == ("1%", "13%", "-13%", "6.3%")


def test_digits_of_small_and_missing_figures() -> None:
    assert (number(1.23456), number(0.05786), number(None), number(math.nan)) == ("1.235", "0.0579", "–", "–")
    assert plus_minus(0.0579, 0.00123) == "0.0579 ± 0.0012"
    assert plus_minus(0.0579, 0.00123, signed=True) == "+0.058 ± 0.001"
    assert plus_minus(1.5, math.nan) == "1.500"
    assert (fixed(math.nan, 3), fixed(math.inf, 2, signed=True)) == ("nan", "+inf")


@given(value=st.floats(-1e6, 1e6))
def test_rows_of_a_comparison_keep_every_digit(value: float) -> None:
    row = measure.blocks([{"reward/total": value}])
    assert json.loads(json.dumps(row))["reward/total"] == [value]


@given(wins=st.integers(0, 40), losses=st.integers(0, 40))
@example(wins=1, losses=15)
def test_win_rates_of_a_study_are_rounded_as_its_page_does(wins: int, losses: int) -> None:
    found = win_rate(wins, 0, losses)
    pair = {"first": "a", "second": "b", **found}
    part = {"name": "motion", "pairs": [pair], "agreement": 0.125, "ranking": []}
    facts = {"title": "t", "votes": 1, "voters": 1, "prompts": 1, "flagged": [], "excluded": False}
    facts |= {"dimensions": [part]}
    text = to_text(facts)
    assert "alpha): 0.13" in text
    if found["rate"] is not None:
        share = Fraction(100 * found["rate"]) * 10
        half_up = math.floor(share + Fraction(1, 2))
        assert f"| {half_up // 10}.{half_up % 10}% |" in text


def test_an_interval_is_printed_like_its_mean() -> None:
    assert lab_report.plus_minus(Interval(0.0625, 0.0005, 3)) == "0.0625 ± 0.0005"
    assert lab_report.percent(Interval(0.125, 0.005, 3)) == "13% ± 1%"
    assert lab_report.plus_minus(None) == lab_report.plus_minus(Interval(math.nan, math.nan, 0)) == "–"
