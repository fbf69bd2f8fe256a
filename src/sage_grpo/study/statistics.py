"""What votes say: win rates with intervals, agreement between raters, and a ranking. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
"""The normal quantile of a two-sided 95% interval."""


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """How often one method was preferred to another."""

    wins: int
    ties: int
    losses: int
    rate: float | None
    """Wins over decided votes; ties are left out of it. None without a decided vote."""
    low: float | None
    """Lower end of the 95% interval."""
    high: float | None
    """Upper end of the 95% interval."""


def win_rate(wins: int, ties: int, losses: int) -> WinRate:
    """Wins among decided votes with Wilson's interval."""
    decided = wins + losses
    rate = wins / decided if decided else None
    low, high = wilson(wins, decided) if decided else (None, None)
    return WinRate(wins=wins, ties=ties, losses=losses, rate=rate, low=low, high=high)


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a binomial share (Wilson, 1927): honest for few trials and for shares near 0 and 1."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"There cannot be {successes} successes in {trials} trials.")
    share, square = successes / trials, z * z
    centre = share + square / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    whole = 1 + square / trials
    # At the ends the two terms are equal, but not to the last bit.
    low = 0.0 if successes == 0 else (centre - half) / whole
    high = 1.0 if successes == trials else (centre + half) / whole
    return low, high


def krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha for names without an order: 1 is full agreement, 0 is chance.

    A unit holds the answers of everybody who judged it; units with fewer than two answers tell nothing. Any number of
    raters, also a different one for each unit. None where nothing was judged twice, or where all answers are the same: then
    there is no chance to compare with.
    """
    counts = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[Hashable] = Counter()
    for unit in counts:
        totals.update(unit)
    everything = sum(totals.values())
    expected = everything**2 - sum(count**2 for count in totals.values())
    if expected == 0:
        return None
    observed = 0.0
    for unit in counts:
        size = sum(unit.values())
        observed += (size**2 - sum(count**2 for count in unit.values())) / (size - 1)
    return 1 - (everything - 1) * observed / expected


def bradley_terry(wins: np.ndarray, *, prior: float = 0.0, tolerance: float = 1e-10, most: int = 100_000) -> np.ndarray:
    """Log-strengths with mean 0 from wins[..., i, j], how often i was preferred to j; a tie is half a win for each.

    P(i is preferred to j) = s_i / (s_i + s_j). Hunter's (2004) minorisation: s_i <- W_i / sum_j n_ij / (s_i + s_j). `prior` adds
    that many ties to every two methods that were compared, so that one that won everything has a finite strength: without it
    that is an error. Leading dimensions are problems of their own.
    """
    wins = np.asarray(wins, dtype=float)
    compared = (wins + np.swapaxes(wins, -1, -2)) > 0
    wins = wins + prior / 2 * compared
    games = wins + np.swapaxes(wins, -1, -2)
    won, played = wins.sum(-1), games.sum(-1) > 0
    if np.any(played & (won == 0)):
        raise ValueError("A method that was never preferred has no finite strength: give a prior.")
    logs = np.zeros(won.shape)
    for _ in range(most):
        strengths = np.exp(logs)
        sums = strengths[..., :, None] + strengths[..., None, :]
        updated = np.log(np.where(played, won, 1.0)) - np.log(np.where(played, (games / sums).sum(-1), 1.0))
        updated -= updated.mean(-1, keepdims=True)
        done = np.abs(updated - logs).max(initial=0.0) < tolerance
        logs = updated
        if done:
            return logs
    raise ValueError("The strengths do not settle: some methods were always preferred to others; give a prior.")


def ranked(groups: np.ndarray, *, draws: int = 1000, seed: int = 0) -> np.ndarray:
    """Rows of (log-strength, low, high), one a method, from wins[group, i, j]; a group is a prompt.

    The 95% interval comes from drawing whole groups with replacement: votes on one prompt are alike. One tie is added to
    every two methods (see `bradley_terry`).
    """
    count = len(groups)
    strengths = bradley_terry(groups.sum(0), prior=1.0)
    times = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=draws)
    drawn = bradley_terry(np.tensordot(times, groups, axes=1), prior=1.0, tolerance=1e-6)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return np.stack([strengths, low, high], axis=-1)
