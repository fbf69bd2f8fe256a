"""Acts on the sentinel's findings: warns, stops, lowers the step size or rolls back to a good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import World
from sage_grpo.health.checks import LEAST
from sage_grpo.health.sentinel import Finding
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.events import SentinelEvent
from sage_grpo.training.state import TrainState


@dataclass
class HealthGuard:
    """Passes every iteration and evaluation to the sentinel, and acts between iterations, alike on all ranks."""

    config: TrainConfig
    state: TrainState
    world: World
    root: Path
    held_out: bool
    report: Callable[[SentinelEvent], None] = lambda event: None
    stops: bool = False
    _found: list[Finding] = field(default_factory=list)

    def see_row(self, row: Mapping[str, float]) -> dict[str, float]:
        return self._see(self.state.sentinel.observe(self.state.iteration, row))

    def see_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scores = {name: [row["scores"][name] for row in rows] for name in (rows[0]["scores"] if rows else ())}
        per_prompt = self.config.evaluate.per_prompt
        return self._see(self.state.sentinel.evaluated(self.state.iteration, scores, per_prompt) if scores else [])

    def _see(self, found: Sequence[Finding]) -> dict[str, float]:
        self._found += found
        sentinel = self.state.sentinel
        metrics = {"sentinel/open": float(len(sentinel.open)), "sentinel/lr_factor": sentinel.brake}
        return {} if self.config.sentinel.action == "off" else metrics

    def act(self) -> bool:
        """Report the findings since the last call and take the configured action; True if the weights have changed."""
        config, sentinel, found = self.config.sentinel, self.state.sentinel, self._found
        self._found = []
        for finding in found:
            if finding.new or config.action == "warn":  # without an action the warning is repeated
                self._say(finding.name, finding.text, "warn")
        names = " and ".join(finding.name for finding in found if finding.act)
        if names and config.action == "rollback":
            return self.roll_back(names)
        if names and config.action == "lower_lr":
            sentinel.brake = max(sentinel.brake * config.lr_factor, LEAST)
            self.state.optimizer.pace.slow_to(sentinel.brake)
            self._say(names, f"{names}: steps are {sentinel.brake:g} times as long from now on.", "lower_lr")
        elif names and config.action == "stop":
            self._stop(names, "sentinel.action is stop.")
        return False

    def mark(self, *, saving: bool) -> bool:
        """Mark the current weights as good if they have just been evaluated, or, in a run without evaluations, if they are saved anyway;
        returns True if they must be saved."""
        state, sentinel = self.state, self.state.sentinel
        evaluates = self.held_out and (self.config.evaluate.every > 0 or bool(self.config.evaluate.early))
        judged = state.evaluated == state.iteration if evaluates else saving
        wanted = self.config.sentinel.action == "rollback" and sentinel.good != state.iteration
        if not (wanted and judged and sentinel.sound):
            return saving
        if state.iteration == 0:
            state.optimizer.materialize()  # a checkpoint has the optimizer's tensors, which the first update would make
        sentinel.good = state.iteration
        return True

    def roll_back(self, why: str) -> bool:
        """Roll back to the good checkpoint, with shorter steps; after too many rollbacks the run ends there. True if it rolled back."""
        sentinel, world = self.state.sentinel, self.world
        if sentinel.good is None:
            return self._stop(why, "There is no good checkpoint to roll back to.")
        folder = self.root / f"{sentinel.good:06d}"
        fault = world.from_main((checkpoint.find_fault(folder) if world.is_main else None) or "")
        if fault:
            return self._stop(why, f"The good checkpoint {folder} cannot be used: {fault}.")
        often = sentinel.rollbacks >= self.config.sentinel.rollbacks
        if not often:
            sentinel.rollbacks += 1
            sentinel.brake *= self.config.sentinel.lr_factor
        self.state.go_back(folder, world)
        text = f"{why}: rolled back to the weights of iteration {sentinel.good} ({folder}), with steps {sentinel.brake:g} times as long."
        self._say(why, text, "rollback")
        if often:
            times = f"It rolled back {sentinel.rollbacks} times before (sentinel.rollbacks)"
            self._stop(why, f"{times}, and shorter steps did not help.")
        return True

    def _stop(self, why: str, reason: str) -> bool:
        self.stops = True
        self._say(why, f"{why}: the run stops. {reason}", "stop")
        return False

    def _say(self, name: str, text: str, action: str) -> None:
        self.report(SentinelEvent(self.state.iteration, name, text, action))
