"""The best and the worst clips of a group."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from sage_grpo.rl.advantage import best_and_worst


@pytest.mark.parametrize("count", [2, 4, 5, 8])
def test_no_other_choice_has_better_best_and_worse_worst(count: int) -> None:
    """Of all ways to take so many clips, half from above and half from below, it has the largest difference of sums."""
    draw = random.Random(count)
    values = [draw.random() for _ in range(9)]
    chosen = best_and_worst(values, [True] * 9, count)
    assert len(set(chosen)) == count

    def apart(places: tuple[int, ...]) -> float:
        ordered = sorted(values[place] for place in places)
        return sum(ordered[count // 2 :]) - sum(ordered[: count // 2])

    best = max(combinations(range(9), count), key=apart)
    assert sorted(chosen) == sorted(best)


def test_the_authors_choice() -> None:
    """DanceGRPO sorts a group by its advantages and takes bestofn // 2 from both ends: --bestofn 8 of 24 is 4 and 4."""
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(24)]
    order = sorted(range(24), key=values.__getitem__)
    assert set(best_and_worst(values, [True] * 24, 8)) == {*order[-8 // 2 :], *order[: 8 // 2]}


def test_failed_clips_are_never_chosen() -> None:
    values = [9.0, -9.0, 0.0, 1.0, 2.0, 3.0]
    valid = [False, False, True, True, True, True]
    assert best_and_worst(values, valid, 2) == [2, 5]
    assert best_and_worst(values, valid, 4) == best_and_worst(values, valid, 6) == [2, 3, 4, 5]
    assert best_and_worst(values, [False] * 6, 2) == []
    assert best_and_worst(values, [True] + [False] * 5, 4) == [0]


def test_equal_clips_are_chosen_in_order_and_so_alike_everywhere() -> None:
    assert best_and_worst([1.0] * 6, [True] * 6, 4) == [0, 1, 4, 5]
    assert best_and_worst([0.0, 1.0, 1.0, 1.0], [True] * 4, 2) == [0, 3]
    assert best_and_worst([3.0, 2.0, 1.0, 0.0], [True] * 4, 2) == [0, 3]


def test_less_than_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        best_and_worst([1.0, 2.0], [True, True], 1)
