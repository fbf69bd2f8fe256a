"""The training loop: iterations, and the evaluations, checkpoints and sentinel actions between them.

`train`, a Python program and `compare` run this loop; they differ in observers, evaluation points and savers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.events import SentinelEvent, StopRequest
from sage_grpo.training.guard import HealthGuard
from sage_grpo.training.loss import Diverged
from sage_grpo.training.trainer import Trainer


class Observer:
    """Receives the events of a run, on all ranks alike and in the same order; a subclass overrides those that it needs."""

    def shows(self, number: int) -> bool:
        """True if it needs the clips of the next iteration, after `number`; otherwise they are decoded only if rewards read them."""
        return False

    def after(self, row: dict[str, float]) -> None:
        """An iteration is complete; the row may be added to."""

    def evaluated(self, found: Evaluation) -> None:
        """An evaluation is complete."""

    def saved(self, folder: Path) -> None:
        """A checkpoint is written."""

    def health_event(self, event: SentinelEvent) -> None:
        """The sentinel reports a finding or an action."""


class Saver(Protocol):
    """Saves the run for resuming."""

    def due(self, number: int, *, last: bool, stopping: bool) -> bool:
        """Decide on saving after `number` iterations."""
        ...

    def save(self, *, needed: bool) -> Path | None:
        """Save now, `needed` if the sentinel may roll back to this point; returns the folder to tell observers of, if any."""
        ...


class Interrupted(Exception):
    """A stop was requested during an evaluation; the continued run repeats it."""


@dataclass
class Loop:
    """A run between its start and its end."""

    trainer: Trainer
    guard: HealthGuard
    saver: Saver
    observers: Sequence[Observer]
    points: Collection[int]
    stop: StopRequest
    evaluation: Callable[[Callable[[], None]], Evaluation] | None = None
    """Evaluates in place of the trainer, where some results are known already."""

    def run(self) -> bool:
        trainer, state, world = self.trainer, self.trainer.state, self.trainer.world
        self.guard.report = self._report
        trainer.needs_clips = lambda number: any(observer.shows(number) for observer in self.observers)
        try:
            if self._due():  # the first, or one that a stop cut short
                self._evaluate()
                self.guard.act()
                self._save(due=False)
            while state.iteration < trainer.config.iterations:
                row = self._step()
                if row is None:  # it diverged and was rolled back
                    continue
                row |= self.guard.see_row(row)
                for observer in self.observers:
                    observer.after(row)
                number, last = state.iteration, state.iteration == trainer.config.iterations
                if self._due():
                    self._evaluate()
                if self.guard.act() and last and trainer.held_out:
                    self._evaluate()  # the last metrics must be those of the final weights
                stopping = world.any(self.stop.asked) or self.guard.stops
                self._save(due=self.saver.due(number, last=last, stopping=stopping))
                if stopping and not last:
                    return True
            return False
        except Interrupted:
            if state.iteration > 0:
                self._write(needed=False)
            return True

    def _step(self) -> dict[str, float] | None:
        """Run one iteration; None if it diverged and was rolled back to a good checkpoint."""
        trainer = self.trainer
        try:
            return trainer.step()
        except Diverged as error:
            wanted = trainer.config.sentinel.action == "rollback"
            if not wanted or not self.guard.roll_back(f"not_finite ({error})") or self.guard.stops:
                raise
            return None

    def _due(self) -> bool:
        state = self.trainer.state
        return bool(self.trainer.held_out) and state.iteration in self.points and state.evaluated < state.iteration

    def _evaluate(self) -> None:
        trainer = self.trainer
        result = (self.evaluation or trainer.evaluate)(self._leave_if_asked)
        trainer.state.evaluated = trainer.state.iteration
        found = replace(result, extra=self.guard.see_evaluation(result.rows) | trainer.clock.report())
        for observer in self.observers:
            observer.evaluated(found)

    def _leave_if_asked(self) -> None:
        """Stop an evaluation after a micro-batch if asked, except the last, which no run would continue."""
        trainer = self.trainer
        if trainer.world.any(self.stop.asked) and trainer.state.iteration < trainer.config.iterations:
            raise Interrupted

    def _save(self, *, due: bool) -> None:
        """Save if it is due, or if the sentinel marks these weights as good."""
        before = self.trainer.state.sentinel.good
        if self.guard.mark(saving=due):
            self._write(needed=self.trainer.state.sentinel.good != before)

    def _write(self, *, needed: bool) -> None:
        folder = self.saver.save(needed=needed)
        if folder is not None:
            for observer in self.observers:
                observer.saved(folder)

    def _report(self, event: SentinelEvent) -> None:
        for observer in self.observers:
            observer.health_event(event)
