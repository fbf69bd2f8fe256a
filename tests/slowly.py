"""Cases of a test that `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values (or tuples of them) for `parametrize`, of which only the quick ones are not slow. One that is not among the values is an error."""
    every = list(values)
    missing = [one for one in quick if one not in every]
    assert not missing, f"there is no case {missing}"
    cases = [one if isinstance(one, tuple) else (one,) for one in every]
    return [one if one in quick else pytest.param(*case, marks=pytest.mark.slow) for one, case in zip(every, cases)]
