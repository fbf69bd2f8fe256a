"""Adapts the learning rate to the exact KL of the updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sage_grpo.health.checks import LEAST

GAIN = 1 / 3
"""Share of a deviation that one observation corrects: a rollout's KL scatters by a factor of 2 around its mean, because
prompts differ."""
LARGEST_STEP = 1.5
"""The factor changes by at most this, up or down, from one rollout to the next."""
SLACK = 0.02
"""Relative tolerance of the KL of a step that is scaled back."""
TRIES = 12
"""Most shares of a step that are measured; two to four are usual."""


class AdaptiveRate:
    """Holds the factor on the learning rate; `observe` is called once per rollout with the same KL on every rank."""

    def __init__(self, target: float | None) -> None:
        self.target, self.factor = target, 1.0
        self.brake = 1.0
        """The sentinel's factor on step sizes, which applies with and without a target."""

    def slow_to(self, brake: float) -> None:
        """Make steps `brake` times as long as they would be; the KL is quadratic in them, so a target follows."""
        self.factor *= brake / self.brake
        self.brake = brake

    def observe(self, kl: float) -> float:
        """Count one rollout's updates, which moved the policy by this KL; returns the factor of the next ones.

        The KL is quadratic in the step, so a step of sqrt(target / kl) times the length would have met the target. A KL
        of exactly 0 means that there was no gradient: it does not change the factor.
        """
        if not math.isfinite(kl) or kl < 0:
            raise ValueError(f"A KL of {kl} cannot steer the learning rate.")
        if self.target is not None and kl > 0:
            kl /= self.brake**2
            wanted = math.sqrt(self.target / kl) ** GAIN
            step = min(max(wanted, 1 / LARGEST_STEP), LARGEST_STEP)
            self.factor = min(max(self.factor * step, LEAST * self.brake), self.brake)
        return self.factor

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"factor": self.factor, "brake": self.brake}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.factor, self.brake = float(state["factor"]), float(state["brake"])


def share_kept(kl: float, most: float, measure: Callable[[float], float]) -> float:
    """The largest share of a step whose KL is at most `most`, within SLACK; `kl` is that of the whole step.

    `measure` returns the KL at a share. The KL is quadratic in short steps only, so shares are searched: the next one
    lies on the line through the last two in logarithms; every fourth, or where that line leaves the bounds, halfway
    between the bounds. Where no try is within SLACK (rounding alone may have a larger KL), it is the largest share
    whose KL was below `most`.
    """
    if kl <= most * (1 + SLACK):
        return 1.0
    low, high, share, power = 0.0, 1.0, 1.0, 2.0
    for number in range(TRIES):
        guess: float = share * (most / kl) ** (1 / power)
        if number % 4 == 3 or not low < guess < high:
            guess = math.sqrt(low * high) or high / 2
        last, share, last_kl, kl = share, guess, kl, max(measure(guess), 1e-30 * most)
        if abs(kl - most) <= SLACK * most:
            return share
        low, high = (share, high) if kl < most else (low, share)
        power = max(0.5, math.log(kl / last_kl) / math.log(share / last))
    return low
