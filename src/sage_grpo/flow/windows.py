"""Which steps of a rollout explore: all, or a window that is fixed, random or sliding.

A window is a function of (number of steps, iteration, seed) alone, so every rank and every resumed run agrees on it, and
all members of all groups of an iteration share it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Window:
    """The stochastic steps of an iteration; all other steps use the ODE."""

    kind: Literal["all", "fixed", "random", "sliding"] = "all"
    """all steps; the same steps always; a place drawn anew every iteration; or moving on (MixGRPO)."""
    start: int = 0
    """First step of a fixed or sliding window."""
    length: int = 4
    """Number of steps in the window."""
    stop: int | None = None
    """Random and sliding windows end before this step; None allows the whole schedule."""
    stride: int = 1
    """Steps by which a sliding window moves; at the end it returns to `start`."""
    every: int = 25
    """Iterations between the moves of a sliding window."""

    def __post_init__(self) -> None:
        if self.kind not in ("all", "fixed", "random", "sliding"):
            raise ValueError(f"window.kind must be all, fixed, random or sliding, got {self.kind!r}.")
        for name, least in (("start", 0), ("length", 1), ("stride", 1), ("every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"window.{name} must be at least {least}, got {getattr(self, name)}.")

    def steps(self, num_steps: int, iteration: int = 0, seed: int = 0) -> tuple[bool, ...]:
        """One flag per step."""
        if self.kind == "all":
            return (True,) * num_steps
        first = self.start
        if self.kind != "fixed":
            stop = num_steps if self.stop is None else min(self.stop, num_steps)
            places = range(self.start, stop - self.length + 1, self.stride if self.kind == "sliding" else 1)
            if not places:
                raise ValueError(
                    f"A window of {self.length} steps from step {self.start} does not fit before step {stop} "
                    f"of {num_steps}: shorten window.length or take more steps."
                )
            if self.kind == "sliding":
                first = places[(iteration // self.every) % len(places)]
            else:
                first = random.Random(f"window/{seed}/{iteration}").choice(places)
        if first + self.length > num_steps:
            raise ValueError(
                f"window covers steps {first} to {first + self.length - 1}, but the schedule has steps 0 to {num_steps - 1}."
            )
        return tuple(first <= index < first + self.length for index in range(num_steps))
