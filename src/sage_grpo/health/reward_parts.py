"""What a reward is made of, over a run: a part that is being lost while the total looks harmless.

Once all clips of a group are alike in something, no advantage speaks of it: what a policy has lost in that way does not come back by
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
"""Standard errors by which a part must be below its best. On recorded runs (research/benchmarks/results/parts_cpu.jsonl) this told every part that was
lost and none that was not; with 4 it also told one that came back."""
FELL, FELL_TWICE, NEARLY = 4.0, 3.25, 2.5
"""The same for held-out prompts: FELL is told at once, FELL_TWICE where it holds at two evaluations in a row, and from NEARLY on weights are
not ones that a rollback may go to. The base is evaluated too, so that what is lost within the first iterations, before there is a window to
compare with, is told as well. An attribute is all or
nothing for most prompts: a loss of a quarter of 128 is four standard errors. With nine parts that only scatter, one of 30 runs with 16
evaluations is told something, and none acts; at 3.25 at once it would be two of five. The last limit leaves out up to half of their
evaluations as places to go back to: better an earlier one than one that has lost something."""


class RewardParts:
    """The best that each part of the trained reward has been, as mean and squared standard error over `window` iterations."""

    def __init__(self, weights: Mapping[str, float], window: int) -> None:
        self.weights, self.window = {part: weight for part, weight in weights.items() if weight}, window
        self.best: dict[str, tuple[float, float]] = {}
        self.held_out: dict[str, Column] = {}
        """Of every part the scores by prompt of its best evaluation, with the sign of its weight."""
        self.low: list[str] = []
        """Parts that were low at the last evaluation."""
        self.falling = False
        """Whether one had begun to fall."""
        self.rows = 0
        """Rows so far."""

    def of(self, row: Row) -> list[str]:
        """Figures of a row that are parts of the total, or parts of those; none where the total has one part and that no parts."""
        names = [name for name in row if self._weight(name)]
        return names if len(names) > 1 else []

    def observe(self, recent: Sequence[Row]) -> str:
        """Take in the newest row, the last of `recent`; says which part is far below its best, or nothing."""
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
        """Take in an evaluation, so many clips of each prompt side by side; says which part is far below its best, or nothing."""
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
        """The weight of the part that a figure is, or is a part of; 0 where it is none."""
        if not name.startswith("reward/"):
            return 0.0
        whole = name.removeprefix("reward/")
        while whole and whole not in self.weights:
            whole = whole.rpartition("/")[0]
        return self.weights.get(whole, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; JSON."""
        return {
            "best": {name: list(best) for name, best in self.best.items()},
            "rows": self.rows,
            "held_out": {name: list(column) for name, column in self.held_out.items()},
            "low": list(self.low),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.best = {name: (mean, doubt) for name, (mean, doubt) in state["best"].items()}
        self.rows, self.held_out, self.low = int(state["rows"]), dict(state["held_out"]), list(state["low"])
