"""Best-of and worst-of selection: which clips of a group are worth training."""

from __future__ import annotations

from collections.abc import Sequence


def best_and_worst(advantage: Sequence[float], valid: Sequence[bool], count: int) -> list[int]:
    """Places of the `count` clips of a group with the largest and the smallest advantages, half each; of an odd number one more of the
    best. (DanceGRPO's best-of-n)

    Clips that are not valid are never among them; where no more are left than asked for, all of these are. Of equal clips the first
    counts as the worse one, so that every rank chooses alike.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, one of the best and one of the worst, got {count}.")
    order = sorted((place for place, ok in enumerate(valid) if ok), key=lambda place: advantage[place])
    worst = count // 2
    return sorted({*order[:worst], *order[worst - count :]})
