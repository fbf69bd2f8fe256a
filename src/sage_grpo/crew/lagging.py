"""What staleness does, without workers: it can be measured where there is one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from sage_grpo.crew.studio import Studio
from sage_grpo.training.anchor import Snapshot
from sage_grpo.training.plan import Plan
from sage_grpo.training.rollout import Rollout


class Lagging:
    """Samples in this process with weights that are some iterations old."""

    def __init__(self, studio: Studio, params: Mapping[str, nn.Parameter]) -> None:
        self.studio, self.params = studio, dict(params)
        self.row: dict[str, float] = {}
        self._era, self._orders = 0, dict[int, tuple[int, Snapshot]]()

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool], era: int = 0) -> Rollout:
        """As a foreman's."""
        self._orders = {n: one for n, one in self._orders.items() if era == self._era and n >= due.iteration}
        self._era, now = era, Snapshot(self.params)
        for plan in (due, *coming):
            self._orders.setdefault(plan.iteration, (due.iteration, now))
        since, weights = self._orders.pop(due.iteration)
        self.row = {"crew/staleness": float(due.iteration - since)}
        with weights.applied():
            return self.studio.sampler(due).run()

    def close(self) -> None:
        """Nothing is open."""
