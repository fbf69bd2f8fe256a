"""From preferences between two clips to one score a clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ordered_pairs(count: int) -> list[tuple[int, int]]:
    """Every two of `count` clips, in both orders: a judge that favours what it sees first favours each of them as often."""
    return [(first, second) for first in range(count) for second in range(count) if first != second]


def win_rates(count: int, pairs: Sequence[tuple[int, int]], preferences: Tensor) -> Tensor:
    """How often each of `count` clips wins over the others, in [0, 1], with mean 1/2.

    preferences: for every pair how much the first is preferred to the second, 1 (surely) to 0 (the second surely); NaN where
    that is not known. Both orders of a pair are averaged, so that p(i, j) + p(j, i) = 1; where one order is not known the pair
    does not count. A clip without any pair is NaN.
    """
    table = torch.full((count, count), torch.nan, dtype=torch.float64)
    for (first, second), preference in zip(pairs, preferences.double().tolist()):
        table[first, second] = preference
    return ((table + 1 - table.T) / 2).nanmean(1).float()
