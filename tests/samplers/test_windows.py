"""Windows depend on (number of steps, iteration, seed) alone, and always fit."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import some
from sage_grpo.samplers.windows import Window


def _places(window: Window, num_steps: int, iterations: range, seed: int = 0) -> list[int]:
    return [window.steps(num_steps, iteration, seed).index(True) for iteration in iterations]


def test_a_sliding_window_moves_every_so_often_and_returns() -> None:
    window = Window(kind="sliding", start=1, length=3, every=2)
    assert _places(window, 9, range(14)) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 1, 1]
    assert _places(replace(window, stop=6), 9, range(8)) == [1, 1, 2, 2, 3, 3, 1, 1]
    assert window.steps(9, 4) == (False,) * 3 + (True,) * 3 + (False,) * 3
    assert {_places(Window(kind="sliding", length=1), 9, range(n, n + 1))[0] for n in (0, 24)} == {0}
    assert _places(Window(kind="sliding", length=1), 9, range(25, 27)) == [1, 1]


def test_a_random_window_visits_every_place_and_obeys_stop_and_seed() -> None:
    window = Window(kind="random", length=3, stop=7)
    assert set(_places(window, 20, range(200))) == {0, 1, 2, 3, 4}
    assert set(_places(replace(window, start=2, stop=99), 7, range(200))) == {2, 3, 4}
    assert _places(window, 20, range(50)) != _places(window, 20, range(50), seed=1)


@some
@given(st.integers(1, 12), st.integers(0, 50), st.lists(st.floats(0.1, 5.0), min_size=3, max_size=6))
def test_drawn_steps_are_stratified(prompts: int, iteration: int, weights: list[float]) -> None:
    """Every step is drawn as often as its weight says, to the nearest whole number above or below."""
    at = list(range(2, 2 + len(weights)))
    window = Window(kind="drawn", at=at, weights=weights)
    rows = window.draw(at, prompts, iteration, seed=3)
    drawn = Counter(rows)
    for step, weight in zip(at, weights):
        expected = prompts * weight / sum(weights)
        assert math.floor(expected - 1e-9) <= drawn[step] <= math.ceil(expected + 1e-9)
    assert rows == window.draw(at, prompts, iteration, seed=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"kind": kind, "start": 2, "length": 3}, "start at step 0 to 1|before step 4")
            for kind in ("fixed", "random")
        ),
        ({"at": []}, "must name different steps"),
        ({"at": [1, 2, 1]}, "must name different steps"),
        ({"weights": [1.0]}, "one weight for every step"),
        ({"at": [1, 2], "weights": [1.0]}, "one weight for every step"),
    ],
)
def test_windows_that_cannot_be_drawn_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Window(**{"kind": "drawn", **options}).steps(4)


def test_which_prompt_draws_which_step_is_random_and_goes_by_iteration_and_seed() -> None:
    window = Window(kind="drawn", at=[1, 2, 3])
    found = {(n, seed): window.draw([1, 2, 3], 3, n, seed) for n in range(20) for seed in (0, 1)}
    assert {rows[0] for rows in found.values()} == {1, 2, 3}
    assert found[0, 0] != found[0, 1] or found[1, 0] != found[1, 1]


def test_a_window_has_four_steps_and_a_drawn_one_has_one_unless_told() -> None:
    assert Window(kind="fixed").steps(6) == (True,) * 4 + (False,) * 2
    assert Window(kind="fixed", start=3, length=3).steps(6) == (False,) * 3 + (True,) * 3
    assert Window(kind="drawn").size == 1
    assert Window().steps(3) == (True,) * 3
    wide, sliding = Window(kind="random", length=1), Window(kind="sliding", length=1, every=1)
    assert wide.steps(10_000) == wide.steps(10_000, 0, 0) != wide.steps(10_000, 0, 1)
    assert sliding.steps(9) == sliding.steps(9, 0) != sliding.steps(9, 1)


def test_a_draw_at_the_very_end_is_still_one_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """(7 + (1 - 2^-53)) / 8 rounds to 1, where no step's share begins."""

    class Last(random.Random):
        def random(self) -> float:
            return 1.0 - 2.0**-53

        def shuffle(self, x: object) -> None:
            """The order does not matter, and a shuffle would wait for another number."""

    monkeypatch.setattr("sage_grpo.samplers.windows.random.Random", Last)
    rows = Window(kind="drawn").draw([3, 4, 5], 8, 0, 0)
    assert set(rows) == {3, 4, 5}
