"""Who sees what: complete, balanced, blind to order, and the same again from the same seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sage_grpo.tools.study.pairs import Shown, Task, attentive, check_count, comparisons, deal, spoilt_pool

PROMPTS, METHODS = 32, 3


def dealt(seed: int = 0, *, against: int | None = None, checks: int = 10, **more: Any) -> list[Task]:
    pool = spoilt_pool(checks, PROMPTS, METHODS, random.Random(1))
    settings = {"methods": METHODS, "pool": pool, **more}
    return deal(comparisons(PROMPTS, METHODS, against), checks=checks, rng=random.Random(seed), **settings)


def test_every_comparison_once_and_the_paper_compares_with_one_method() -> None:
    tasks = [task for task in dealt() if task.kind == "pair"]
    assert len(tasks) == 96
    assert len({task.identity for task in tasks}) == 96
    against = [task for task in dealt(against=1) if task.kind == "pair"]
    assert len(against) == 64
    assert all(1 in (task.left.method, task.right.method) for task in against)


def test_sides_and_order_are_random_and_balanced() -> None:
    tasks = dealt()
    for pair in ({0, 1}, {0, 2}, {1, 2}):
        left = Counter(t.left.method for t in tasks if t.kind == "pair" and {t.left.method, t.right.method} == pair)
        assert list(left.values()) == [16, 16]
    other = dealt(1)
    assert [task.prompt for task in tasks] != [task.prompt for task in other]
    flipped = {task.identity: task.left for task in other}
    assert 20 < sum(flipped.get(task.identity) == task.left for task in tasks if task.kind == "pair") < 76
    assert dealt(1) == other
    wanted = comparisons(PROMPTS, METHODS)
    settings: Any = {"checks": 0, "methods": METHODS, "pool": []}
    forth, back = (deal(order, rng=random.Random(1), **settings) for order in (wanted, wanted[::-1]))
    assert forth == back  # whatever order they come in


@pytest.mark.parametrize("prompts", [1, 3])
def test_where_halves_do_not_come_out_even_either_side_is_as_likely(prompts: int) -> None:
    """A rater with one comparison of two methods, or three: over raters, each method is left half of the time."""
    firsts = Counter(
        sum(task.left.method == 0 for task in deal(
            comparisons(prompts, 2), checks=0, methods=2, pool=[], rng=random.Random(seed)
        ))
        for seed in range(200)
    )  # fmt: skip
    assert firsts.keys() == {prompts // 2, prompts // 2 + 1}
    assert min(firsts.values()) > 70


def test_attention_checks_are_spread_and_of_both_kinds() -> None:
    for seed in range(5):
        tasks = dealt(seed)
        kinds = Counter(task.kind for task in tasks)
        assert kinds == {"pair": 96, "same": 5, "degraded": 5}
        assert len({task.identity for task in tasks}) == 106
        places = [place for place, task in enumerate(tasks) if task.kind != "pair"]
        assert all(max(1, 10 * k) - 1 <= place <= 11 * (k + 1) for k, place in enumerate(places))
    firsts = Counter(next(task.kind for task in dealt(seed) if task.kind != "pair") for seed in range(40))
    assert min(firsts["same"], firsts["degraded"]) > 8
    sides = Counter(task.left.degraded for seed in range(40) for task in dealt(seed) if task.kind == "degraded")
    assert sides.keys() == {False, True}
    assert min(sides.values()) > 60  # of 200
    assert check_count(0.1, 96) == 10
    assert check_count(0.001, 96) == 1
    assert check_count(0, 96) == 0


WHOLE, SPOILT = Shown(0), Shown(0, degraded=True)


@pytest.mark.parametrize(
    ("task", "answers", "passed"),
    [
        (Task(0, WHOLE, WHOLE), ["tie", "tie"], True),
        (Task(0, WHOLE, WHOLE), ["tie", "left"], False),
        (Task(0, WHOLE, SPOILT), ["left", "tie"], True),
        (Task(0, SPOILT, WHOLE), ["right", "right"], True),
        (Task(0, SPOILT, WHOLE), ["left", "right"], False),
        (Task(0, WHOLE, SPOILT), ["tie", "tie"], False),
    ],
)
def test_what_passes_an_attention_check(task: Task, answers: list[str], passed: bool) -> None:
    assert attentive(task, answers) is passed
