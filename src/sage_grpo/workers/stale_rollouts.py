"""Stale rollouts in one process, without workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import PastWeights
from sage_grpo.training.rollout import Rollout


class StaleRollouts:
    """Samples in this process with weights that are some iterations old."""

    def __init__(self, engine: RolloutEngine, past: PastWeights) -> None:
        self.engine, self.past = engine, past
        self.row: dict[str, float] = {}

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        since, weights = self.past.promise(due.iteration, [plan.iteration for plan in coming])[due.iteration]
        self.row = {"crew/staleness": float(due.iteration - since)}
        with weights.applied():
            return self.engine.sampler(due).run()

    def close(self) -> None:
        """No resources to release."""
