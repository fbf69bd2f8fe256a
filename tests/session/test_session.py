"""How a session opens, ends and tells of it, on as much of a world and a trainer as it asks."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sage_grpo import session
from sage_grpo.folder.identity import Found
from sage_grpo.folder.journal import read_events
from sage_grpo.named import ObjectNeeded
from sage_grpo.parallel.checkpoint import SaveFailed
from sage_grpo.parallel.world import RankLost
from sage_grpo.recipes import recipe
from sage_grpo.session.preflight import preflight


@pytest.mark.parametrize(("raised", "closed"), [(None, 1), (ValueError("x"), 1), (RankLost("rank 1"), 0)])
def test_a_world_is_closed_unless_a_rank_is_gone(raised: Exception | None, closed: int, monkeypatch) -> None:
    done, told = [], []
    world = SimpleNamespace(size=2, is_main=True, watching=nullcontext, close=lambda: done.append(1))
    monkeypatch.setattr(session, "start", lambda parallel, device: world)
    monkeypatch.setattr(session, "preflight", lambda config, size, given: [f"{size} ranks", str(given)])
    refused = pytest.raises(type(raised)) if raised else nullcontext()
    with refused, session.session(recipe("shapes/sage"), "given", told.append) as opened:  # type: ignore[arg-type]
        assert opened is world
        if raised:
            raise raised
    assert len(done) == closed
    assert told == ["2 ranks", "given"]
    world.is_main = False
    with session.session(recipe("shapes/sage"), None, told.append):
        pass
    with session.session(recipe("shapes/sage")):
        pass
    assert len(told) == 2


def test_objects_of_a_program_cannot_be_loaded_by_their_names() -> None:
    config = recipe("shapes/sage")
    with pytest.raises(ObjectNeeded, match=r"got its prompts as an object .*Give a file \(--data\.prompts"):
        preflight(replace(config, data=replace(config.data, prompts="object:rows")))


class Said:
    """A terminal that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str | None]] = []
        self.console = SimpleNamespace(print=lambda table: None)

    def say(self, text: str, *, style: str | None = None) -> None:
        self.lines.append((text, style))


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """As much of a trainer as the end of a run asks."""
    sentinel = SimpleNamespace(doubts=[])
    return SimpleNamespace(
        config=replace(recipe("shapes/sage"), out=str(tmp_path), profile=None), export=lambda folder: folder.mkdir(),
        state=SimpleNamespace(iteration=4, best={}, sentinel=sentinel, size=9, load=lambda *words: None),
        world=SimpleNamespace(is_main=True, from_main=lambda text: text, barrier=lambda: None),
    )  # fmt: skip


def test_a_run_says_why_it_stops_and_where_it_stands(trainer: Any, tmp_path: Path) -> None:
    said: Any = Said()
    for number, sentinel, signal in ((4, True, True), (4, False, True), (0, False, False)):
        trainer.state.iteration = number
        session._say_why(trainer, said, by_sentinel=sentinel, by_signal=signal)
    ways = ["by the sentinel after iteration 4; saved", "by signal after iteration 4; saved"]
    ways.append("as asked before the first iteration")
    assert said.lines == [(f"Stopped {way}. The same command continues from here.", None) for way in ways]
    assert [(one["kind"], one["text"]) for one in read_events(tmp_path)] == [
        ("stop", "by the sentinel"), ("stop", "by signal"), ("stop", "as asked"),
    ]  # fmt: skip


def test_a_run_ends_with_its_weights_and_says_what_is_doubted(trainer: Any, tmp_path: Path) -> None:
    said: Any = Said()
    session._finish(trainer, said)
    assert (tmp_path / ".finished").read_text() == "4\n"
    assert len(said.lines) == 1
    assert said.lines[0][0].startswith(f"Done. Weights: {tmp_path / 'final'}   metrics: {tmp_path / 'metrics.jsonl'}")
    (tmp_path / "final").rmdir()
    trainer.state.sentinel.doubts, trainer.state.best = ["hacking", "drift"], {"iteration": 3}
    session._finish(trainer, said)
    doubt, style = said.lines[2]
    assert doubt.endswith("this run ends with (hacking, drift): best/ has those after iteration 3.")
    assert style == "yellow"
    assert [one["text"] for one in read_events(tmp_path)] == ["", doubt]
    trainer.state.best = {"iteration": 0}
    assert session._doubt(trainer).endswith("look at their clips before you use them.")
    (tmp_path / ".finished").unlink()
    with pytest.raises(SaveFailed, match=r"final: FileExistsError: .*Checkpoint 4 has them"):
        session._finish(trainer, said)
    assert not (tmp_path / ".finished").exists()
    trainer.world.is_main = False
    (tmp_path / "final").rmdir()
    session._finish(trainer, said)
    assert not (tmp_path / ".finished").exists()


def test_a_resumed_run_tells_where_it_stands_and_what_has_changed(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    loaded: list[Any] = []
    trainer.state.load = lambda *words: loaded.append(words)
    trainer.state.stream = SimpleNamespace(peek=lambda count: ["a"] * count)
    trainer.planner = SimpleNamespace(plan=lambda number, prompts: (number, len(prompts)))
    trainer.objective, trainer.model = SimpleNamespace(dims=8, clip=0.1), SimpleNamespace(device="cpu")
    shown: dict[str, Any] = {}
    monkeypatch.setattr(session, "foresee", lambda config, plan: plan)
    monkeypatch.setattr(session, "evaluations_of", lambda config, plan, branches: f"{branches(0.5)} branch")
    monkeypatch.setattr(session, "plan_table", lambda config, plan, **named: shown.update(named, plan=plan))
    fresh = Found("", {}, [], [], None)
    said: Any = Said()
    assert session._resume(trainer, tmp_path, fresh, said) is None
    assert (loaded, said.lines) == ([], [])
    assert shown == {
        "dims": 8, "clip": 0.1, "device": "cpu", "parameters": 9, "evaluations": "1 branch", "choices": None,
        "plan": (0, trainer.config.batch.prompts),
    }  # fmt: skip
    folder = tmp_path / "checkpoints" / "000004"
    for profile, changed, lines in ((None, [], 0), (4, [], 0), (3, ["out", "seed"], 2)):
        trainer.config, said.lines[:] = replace(trainer.config, profile=profile), []
        assert session._resume(trainer, tmp_path, replace(fresh, checkpoint="000004", changed=changed), said) == 4
        assert said.lines[0] == (f"Resumed from {folder} at iteration 4.", None)
        assert len(said.lines) == 1 + lines
    assert said.lines[1:] == [
        ("profile 3: that iteration is over, so nothing is recorded. Use 4 or more.", "yellow"),
        ("The run differs from the checkpoint's in: out, seed.", "yellow"),
    ]
    assert loaded[-1] == (folder, trainer.world)
    trainer.model = SimpleNamespace(branches=lambda sigma, guided: (sigma, guided))
    monkeypatch.setattr(import_module("sage_grpo.session"), "RunsCheaply", SimpleNamespace)
    assert session._branches(trainer, 0.5) == (0.5, trainer.config.model.training_guidance)


def test_the_files_of_a_run_are_written_when_it_begins(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    asked: list[Any] = []
    group = SimpleNamespace(noise=lambda: {"sigmas": [1.0, 0.0]})
    trainer.state.stream = SimpleNamespace(peek=lambda count: ["a"] * count)
    trainer.planner = SimpleNamespace(plan=lambda number, prompts: SimpleNamespace(groups=[group]))
    trainer.examples = None
    monkeypatch.setattr(session.Metrics, "open", lambda *words, **named: asked.append((words, named)) or "open")
    said: Any = Said()
    fresh = Found("", {}, [], ["a note"], None)
    assert session._open_metrics(trainer, fresh, said, None) == "open"
    assert json.loads((tmp_path / "schedule.json").read_text()) == {"sigmas": [1.0, 0.0]}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["out"] == str(tmp_path)
    (words, named) = asked[0]
    assert (*words[:2], words[2]["out"]) == (tmp_path, trainer.config.log, str(tmp_path))
    assert named["resumed_at"] is None
    copy = tmp_path / "checkpoints" / "000004"
    copy.mkdir(parents=True)
    (copy / "metrics.jsonl").write_text('{"iteration": 1}\n')
    session._open_metrics(trainer, replace(fresh, checkpoint="000004", changed=["out", "seed"]), said, 4)
    assert (bytes(asked[1][1]["journal"].rows), asked[1][1]["resumed_at"]) == (b'{"iteration": 1}\n', 4)
    ((damaged, style),) = said.lines
    assert ("was damaged" in damaged, style) == (True, "yellow")
    events = [(one["kind"], one["text"]) for one in read_events(tmp_path)]
    assert events == [("start", "a note"), ("resume", f"{damaged} a note changed: out, seed")]
    trainer.world.is_main = False
    assert session._open_metrics(trainer, fresh, said, None).journal is None
