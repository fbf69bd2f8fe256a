"""Checks the parts of a reward: one may be lost while the total looks harmless.

Once all clips of a group are equal in a respect, no advantage depends on it: a policy does not regain such a loss by
itself, and other parts may hide it in the sum (research/results/where.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any

from sage_grpo.health.checks import Row, values
from sage_grpo.health.evidence import Column, Scores, by_prompt, change, finite

FALLEN = 5.0
"""Standard errors by which a part must be below its best. On recorded runs (research/benchmarks/results/parts_cpu.jsonl) this
found every part that was lost and no other; with 4 it also found one that recovered."""
FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5
"""The same for held-out prompts: FELL warns at once, FELL_TWICE if it holds at two evaluations in a row, and from
NEARLY on a rollback may not use the weights. With nine parts that only scatter, one of 30 runs with 16 evaluations has a
warning, and none an action; at 3.25 at once it would be two of five."""


class RewardParts:
    """The best mean of each part of the trained reward over `window` iterations, with its squared standard error."""

    def __init__(self, weights: Mapping[str, float], window: int) -> None:
        self.weights, self.window = {part: weight for part, weight in weights.items() if weight}, window
        self.best: dict[str, tuple[float, float]] = {}
        self.held_out: dict[str, Column] = {}
        """Scores of every part by prompt at its best evaluation, with the sign of its weight."""
        self.low: list[str] = []
        """Parts that were low at the last evaluation."""
        self.falling = False
        self.rows = 0

    def of(self, row: Row) -> list[str]:
        """Metrics of a row that are parts of the total, or their parts; empty if there is only one."""
        names = [name for name in row if self._weight(name)]
        return names if len(names) > 1 else []

    def observe(self, recent: Sequence[Row]) -> str:
        """Add the newest row, the last of `recent`; returns a text on parts far below their best, or an empty one."""
        self.rows += 1
        if len(recent) < self.window:
            return ""
        fallen = []
        for name in self.of(recent[-1]):
            own = values(recent[-self.window :], name)
            if len(own) < self.window:
                continue
            sign = math.copysign(1.0, self._weight(name))
            now, doubt = sign * fmean(own), variance(own) / len(own)
            best = self.best.get(name)
            if best is not None and best[0] - now > FALLEN * math.sqrt(doubt + best[1]):
                fallen.append(f"{name} is {sign * now:.3g}, it was {sign * best[0]:.3g} at its best")
            if self.rows % self.window == 0 and (best is None or now > best[0]):
                self.best[name] = now, doubt
        return "; ".join(fallen)

    def evaluated(self, scores: Scores, per_prompt: int) -> str:
        """The same for an evaluation with `per_prompt` adjacent clips of each prompt."""
        names = [name for name in scores if self._weight(f"reward/{name}")]
        fallen, low, self.falling = [], [], False
        for name in names if len(names) > 1 else []:
            sign = math.copysign(1.0, self._weight(f"reward/{name}"))
            now = [None if value is None else sign * value for value in by_prompt(scores[name], per_prompt)]
            best = self.held_out.get(name)
            if best is not None:
                lost = change(now, best)
                self.falling |= lost.surely(NEARLY)
                low += [name] * lost.surely(FELL_TWICE)
                if lost.surely(FELL) or (name in low and name in self.low):
                    was = sign * fmean(finite(best))
                    fallen.append(f"{name} is {lost.by:.3g} +- {lost.stderr:.2g} below its best, {was:.3g}")
            if finite(now) and (best is None or change(best, now).by > 0):
                self.held_out[name] = now
        self.low = low
        return "; ".join(fallen)

    def _weight(self, name: str) -> float:
        """Weight of the reward part that a metric belongs to; 0 if none."""
        if not name.startswith("reward/"):
            return 0.0
        whole = name.removeprefix("reward/")
        while whole and whole not in self.weights:
            whole = whole.rpartition("/")[0]
        return self.weights.get(whole, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": {name: list(best) for name, best in self.best.items()},
            "rows": self.rows,
            "held_out": {name: list(column) for name, column in self.held_out.items()},
            "low": list(self.low),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = {name: (mean, doubt) for name, (mean, doubt) in state["best"].items()}
        self.rows, self.held_out, self.low = int(state["rows"]), dict(state["held_out"]), list(state["low"])
