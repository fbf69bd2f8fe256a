"""Exploring steps of a rollout: all, a window that is fixed, random or sliding, or one that each prompt draws for itself.

A window is a function of (number of steps, iteration, seed) and, where prompts draw, of the group's place alone, so every rank
and every resumed run agrees on it. All members of a group share it.
"""

from __future__ import annotations

import bisect
import random
from itertools import accumulate
from typing import Literal

from sage_grpo.config.ranges import Count, Natural, Positive, checked


@checked
class Window:
    """Steps that explore (add noise); all others are deterministic."""

    kind: Literal["all", "fixed", "random", "sliding", "drawn"] = "all"
    """all steps, or a window: fixed, random per iteration, sliding (MixGRPO), or drawn per prompt (branch)."""
    start: Natural = 0
    """First step of a fixed window; the earliest of random and sliding ones."""
    length: Count | None = None
    """Steps in the window; None is 4, or 1 for a drawn window."""
    stop: Count | None = None
    """Random and sliding windows end before this step; None is the end of the schedule."""
    every: Count = 25
    """Iterations between moves of a sliding window."""
    at: list[Natural] | None = None
    """Allowed first steps of drawn windows; None is every trainable step."""
    weights: list[Positive] | None = None
    """Relative frequency of each step in at; None is equal (see sage-grpo probe)."""

    def __post_init__(self) -> None:
        if self.kind != "drawn":
            for name, unused in (("at", None), ("weights", None)):
                if getattr(self, name) != unused:
                    raise ValueError(f"window.{name} is for drawn windows: set window.kind to drawn, or leave it out.")
            return
        if self.at is not None and (not self.at or len(set(self.at)) < len(self.at)):
            raise ValueError(f"window.at must name different steps, got {self.at}.")
        if self.weights is not None and (self.at is None or len(self.weights) != len(self.at)):
            raise ValueError(f"window.weights {self.weights} needs one weight for every step of window.at {self.at}.")

    @property
    def size(self) -> int:
        return self.length if self.length is not None else 1 if self.kind == "drawn" else 4

    def steps(self, num_steps: int, iteration: int = 0, seed: int = 0) -> tuple[bool, ...]:
        """One flag per step, for windows that all groups of an iteration share."""
        if self.kind == "all":
            return (True,) * num_steps
        first = self.start
        if self.kind != "fixed":
            stop = num_steps if self.stop is None else min(self.stop, num_steps)
            places = range(self.start, stop - self.size + 1)
            if not places:
                raise ValueError(
                    f"A window of {self.size} steps from step {self.start} does not fit before step {stop} "
                    f"of {num_steps}: shorten window.length or take more steps."
                )
            if self.kind == "sliding":
                first = places[(iteration // self.every) % len(places)]
            else:
                first = random.Random(f"window/{seed}/{iteration}").choice(places)
        return self.flags(first, num_steps)

    def covered(self, num_steps: int) -> list[bool]:
        """The steps that a window of any iteration may cover."""
        if self.kind == "fixed":
            return list(self.steps(num_steps))
        if self.kind == "drawn" and self.at is not None:
            return [any(first <= index < first + self.size for first in self.at) for index in range(num_steps)]
        if self.kind in ("random", "sliding"):
            return [self.start <= index < (self.stop or num_steps) for index in range(num_steps)]
        return [True] * num_steps

    def flags(self, first: int, num_steps: int) -> tuple[bool, ...]:
        last = num_steps - self.size
        if not 0 <= first <= last:
            places = f"may start at step 0 to {last}" if last >= 0 else "does not fit"
            raise ValueError(f"A window that starts at step {first}: of {num_steps} steps one of {self.size} {places}.")
        return tuple(first <= index < first + self.size for index in range(num_steps))

    def draw(self, allowed: list[int], prompts: int, iteration: int, seed: int) -> list[int]:
        """First step of every prompt's window, among the allowed ones (which are `at` where it is given).

        Stratified: over the prompts of an iteration every step is drawn as often as its weight says, to the nearest whole number;
        which prompt gets which is random.
        """
        draw = random.Random(f"branch/{seed}/{iteration}")
        weights = self.weights or [1.0] * len(allowed)
        bounds = list(accumulate(weight / sum(weights) for weight in weights))
        offset = draw.random()
        points = [(offset + number) / prompts for number in range(prompts)]
        drawn = [allowed[min(bisect.bisect_right(bounds, point), len(allowed) - 1)] for point in points]
        draw.shuffle(drawn)
        return drawn
