"""The one loop of training: iterations, and what stands between them. Everybody else only watches.

`train`, a Python program and `compare` run this loop; they differ in their observers, in where evaluations stand and in what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.events import SentinelEvent, StopRequest
from sage_grpo.training.guard import Guard
from sage_grpo.training.trainer import Trainer
from sage_grpo.training.update import Diverged


@dataclass
class Evaluated:
    """An evaluation that is done, as observers see it."""

    result: Evaluation
    metrics: dict[str, float]
    """Its scores, what the sentinel says of them, and the seconds that it took."""
    best: bool = False
    """Whether its weights are the best so far: set by who keeps the best."""


class Observer:
    """Watches a run. All ranks call their observers alike and in the same order; one that cares about nothing else leaves the rest out."""

    def during(self, number: int) -> AbstractContextManager[object]:
        """Around the computation of an iteration, `number` of which are complete."""
        return nullcontext()

    def shows(self, number: int) -> bool:
        """Whether it looks at the clips of the next iteration, after so many: only then are they decoded whole."""
        return False

    def after(self, row: dict[str, float]) -> None:
        """An iteration is complete; the row may be added to."""

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation is complete."""

    def saved(self, folder: Path) -> None:
        """A checkpoint is written, or is being written in the background."""

    def told(self, event: SentinelEvent) -> None:
        """The sentinel found or did something."""


class Saver(Protocol):
    """Keeps the run, so that it can be continued."""

    def due(self, number: int, *, last: bool, stopping: bool) -> bool:
        """Whether to save after so many iterations."""
        ...

    def save(self, *, needed: bool) -> Path | None:
        """Save now; `needed` by a sentinel that may go back to here. Returns where, or None where it could not."""
        ...


class Interrupted(Exception):
    """A stop was asked for during an evaluation, which the continued run will do again."""


@dataclass
class Loop:
    """A run between its start and its end."""

    trainer: Trainer
    guard: Guard
    saver: Saver
    observers: Sequence[Observer]
    points: Collection[int]
    """After how many iterations evaluations stand."""
    stop: StopRequest
    evaluation: Callable[[Callable[[], None]], Evaluation] | None = None
    """Evaluates in the trainer's place, for who knows some results already."""

    def run(self) -> bool:
        """Iterate to the end; returns whether somebody stopped it before."""
        trainer, state, world = self.trainer, self.trainer.state, self.trainer.world
        self.guard.tell = self._told
        try:
            if self._due():  # the first, or one that a stop cut short
                self._evaluate()
                self.guard.act()
                self._save(due=False)
            while state.iteration < trainer.config.iterations:
                row = self._step()
                if row is None:  # it diverged, and the sentinel went back
                    continue
                row |= self.guard.see_row(row)
                for observer in self.observers:
                    observer.after(row)
                number, last = state.iteration, state.iteration == trainer.config.iterations
                if self._due():
                    self._evaluate()
                if self.guard.act() and last and trainer.held_out:
                    self._evaluate()  # the last figures are those of the weights that the run ends with
                stopping = world.any(self.stop.asked) or self.guard.stops
                if trainer.writer.background and world.any(trainer.writer.failed):
                    trainer.writer.finish()  # raises what went wrong
                self._save(due=self.saver.due(number, last=last, stopping=stopping))
                if stopping and not last:
                    return True
            return False
        except Interrupted:
            if state.iteration > 0:
                self._write(needed=False)
            return True

    def _step(self) -> dict[str, float] | None:
        """One iteration; None where it diverged and the run went back to a good checkpoint instead."""
        trainer = self.trainer
        trainer.shows = self._shows
        try:
            with ExitStack() as around:
                for observer in self.observers:
                    around.enter_context(observer.during(trainer.state.iteration))
                return trainer.step()
        except Diverged as error:
            wanted = trainer.config.sentinel.action == "rollback"
            if not wanted or not self.guard.roll_back(f"not_finite ({error})") or self.guard.stops:
                raise
            return None

    def _shows(self, number: int) -> bool:
        return any(observer.shows(number) for observer in self.observers)

    def _due(self) -> bool:
        """Whether this moment is to be evaluated and has not been."""
        state = self.trainer.state
        return bool(self.trainer.held_out) and state.iteration in self.points and state.evaluated < state.iteration

    def _evaluate(self) -> None:
        trainer = self.trainer
        result = (self.evaluation or trainer.evaluate)(self._leave_if_asked)
        trainer.state.evaluated = trainer.state.iteration
        seen = self.guard.see_evaluation(result.rows)
        found = Evaluated(result, {**result.metrics, **seen, **trainer.clock.report()})
        for observer in self.observers:
            observer.evaluated(found)

    def _leave_if_asked(self) -> None:
        """Called after every micro-batch of an evaluation. The last evaluation is finished: there is nothing to come back for."""
        trainer = self.trainer
        if trainer.world.any(self.stop.asked) and trainer.state.iteration < trainer.config.iterations:
            raise Interrupted

    def _save(self, *, due: bool) -> None:
        """Save where it is due, or where the sentinel takes this moment for one to go back to."""
        sentinel = self.trainer.state.sentinel
        before = sentinel.good
        if self.guard.mark(saving=due):
            self._write(needed=sentinel.good != before)

    def _write(self, *, needed: bool) -> None:
        folder = self.saver.save(needed=needed)
        if folder is not None:
            for observer in self.observers:
                observer.saved(folder)

    def _told(self, event: SentinelEvent) -> None:
        for observer in self.observers:
            observer.told(event)
