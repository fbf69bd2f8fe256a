"""One score per clip from preferences between two clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ordered_pairs(count: int) -> list[tuple[int, int]]:
    """All ordered pairs of `count` clips: a judge that favours the first of a pair then favours every clip equally often."""
    return [(first, second) for first in range(count) for second in range(count) if first != second]


def win_rates(count: int, pairs: Sequence[tuple[int, int]], preferences: Tensor) -> Tensor:
    """Win rate of each of `count` clips over the others, in [0, 1], with mean 1/2.

    preferences: for every pair the preference for the first clip, 1 (surely) to 0 (the second surely); NaN if unknown. Both orders of a pair are
    averaged, so that p(i, j) + p(j, i) = 1; a pair with an unknown order is left out. A clip without any pair is NaN.
    """
    table = torch.full((count, count), torch.nan, dtype=torch.float64)
    for (first, second), preference in zip(pairs, preferences.double().tolist()):
        table[first, second] = preference
    return ((table + 1 - table.T) / 2).nanmean(1).float()
