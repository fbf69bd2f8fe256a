"""The loop itself, with observers and a saver of the tests' own: who is told what, in which order, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sage_grpo.callbacks.observers import UserCallbacks
from sage_grpo.health.config import SentinelConfig
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.events import Hooks, SentinelEvent, StopRequest
from sage_grpo.training.guard import HealthGuard
from sage_grpo.training.loop import Loop, Observer
from sage_grpo.training.loss import Diverged
from sage_grpo.training.trainer import Trainer
from trainer_helpers import same, weights_of

Log = list[tuple[object, ...]]


@dataclass
class Noting(Observer):
    name: str
    log: Log

    def shows(self, number: int) -> bool:
        return self.name == "b" and number == 1

    def after(self, row: dict[str, float]) -> None:
        self.log.append((self.name, "after", *sorted(name for name in row if name.startswith("added/"))))
        row[f"added/{self.name}"] = 1.0

    def evaluated(self, found: Evaluation) -> None:
        self.log.append((self.name, "evaluated", found.best))
        found.best = True

    def saved(self, folder: Path) -> None:
        self.log.append((self.name, "saved", folder.name))

    def health_event(self, event: SentinelEvent) -> None:
        self.log.append((self.name, event.action, event.iteration))


@dataclass
class Keeping:
    trainer: Trainer
    root: Path
    when: Sequence[int] = ()
    saves: list[tuple[int, bool]] = field(default_factory=list)

    def due(self, number: int, *, last: bool, stopping: bool) -> bool:
        return number in self.when

    def save(self, *, needed: bool) -> Path:
        self.saves.append((self.trainer.state.iteration, needed))
        return self.trainer.save(self.root)


@pytest.fixture
def loop(make_config, make_trainer, tmp_path: Path):
    """A loop over three iterations; fields of its configuration and of the loop itself may be given."""

    def make(*, when: Sequence[int] = (), config: dict | None = None, **fields: object) -> Loop:
        trainer, folder = make_trainer(make_config(**(config or {}))), tmp_path / "saved"
        guard = HealthGuard(trainer.config, trainer.state, trainer.world, folder, held_out=bool(trainer.held_out))
        given = {"observers": (), "points": (), "stop": StopRequest(), **fields}
        return Loop(trainer, guard, Keeping(trainer, folder, when), **given)

    return make


def test_observers_are_told_in_their_order_and_see_what_those_before_them_added(loop) -> None:
    log: Log = []
    run = loop(observers=[Noting("a", log), Noting("b", log)], points=[1], when=[1])
    shown: list[bool] = []
    needed = lambda: shown.append(run.trainer.needs_clips(run.trainer.state.iteration))  # noqa: E731
    run.trainer.step, step = lambda: (needed(), log.append(("step",)), step())[2], run.trainer.step
    assert run.run() is False
    assert shown == [False, True, False]
    one = [("step",), ("a", "after"), ("b", "after", "added/a")]
    one += [("a", "evaluated", False), ("b", "evaluated", True), ("a", "saved", "000001"), ("b", "saved", "000001")]
    assert log[: len(one)] == one
    assert log[len(one) :].count(("step",)) == 2  # and the other two iterations are neither evaluated nor saved
    assert not [what for _, what, *_ in (note for note in log[len(one) :] if len(note) > 1) if what == "saved"]


def test_evaluations_stand_at_the_points_and_are_not_repeated(loop) -> None:
    at: list[int] = []
    run = loop(points=[0, 2, 3])
    evaluate = run.trainer.evaluate
    run.trainer.evaluate = lambda after: (at.append(run.trainer.state.iteration), evaluate(after))[1]
    run.run()
    assert at == [0, 2, 3]
    assert run.trainer.state.evaluated == 3
    run.trainer.state.iteration = 2
    run.trainer.state.evaluated = 2  # as in a run that is continued from a point which has been evaluated
    run.run()
    assert at == [0, 2, 3, 3]


@dataclass
class Stopping(Observer):
    loop: Loop
    number: int

    def after(self, row: dict[str, float]) -> None:
        if self.loop.trainer.state.iteration == self.number:
            self.loop.stop.set()


def test_a_stop_during_an_evaluation_leaves_it_to_the_continued_run(loop) -> None:
    log: Log = []
    run = loop(points=[2], when=[1])
    run.observers = [Stopping(run, 2), Noting("a", log)]
    assert run.run() is True
    assert run.trainer.state.iteration == 2
    assert run.trainer.state.evaluated == -1  # so the continued run does it first
    assert not [note for note in log if note[1] == "evaluated"]
    assert run.saver.saves == [(1, False), (2, False)]  # also where nothing was due
    run.stop = StopRequest()
    assert run.run() is False
    assert [note for note in log if note[1] == "evaluated"] == [("a", "evaluated", False)]


def test_the_last_evaluation_is_finished_although_a_stop_was_asked_for(loop) -> None:
    run = loop(points=[3])
    run.observers = [Stopping(run, 3)]
    assert run.run() is False
    assert run.trainer.state.evaluated == 3


def test_an_iteration_that_diverges_is_left_out_and_the_weights_of_the_good_checkpoint_are_back(loop) -> None:
    log: Log = []
    config = {"sentinel": SentinelConfig(action="rollback"), "iterations": 4}
    run = loop(observers=[Noting("a", log)], points=[0, 1], config=config)
    trainer, seen = run.trainer, {}
    step = trainer.step

    def diverges_once() -> dict[str, float]:
        number = trainer.state.iteration
        seen.setdefault(number, weights_of(trainer))
        if number == 2 and "raised" not in seen:
            seen["raised"] = True
            raise Diverged("the loss is not finite")
        if "raised" in seen:
            seen.setdefault("back", weights_of(trainer))
        return step()

    trainer.step = diverges_once
    assert run.run() is False
    assert trainer.state.iteration == 4
    assert ("a", "rollback", 2) in log
    assert sum(note[1] == "after" for note in log) == 4  # the one that diverged is nobody's row
    assert run.saver.saves[:2] == [(0, True), (1, True)]  # what the sentinel may go back to is needed
    assert same(seen[1], seen["back"])  # the weights after one iteration


def test_a_program_that_is_told_of_iterations_gets_whole_clips() -> None:
    asked = [UserCallbacks(None, hooks, None) for hooks in (Hooks(iteration=lambda event: None), Hooks())]
    assert [one.shows(0) for one in asked] == [True, False]
