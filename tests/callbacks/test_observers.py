"""Observers of a run on as much of a trainer as they ask, and the terminal: what is said, saved, shown and pruned."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.callbacks import observers
from sage_grpo.callbacks.journal import Journal, read_events
from sage_grpo.callbacks.metrics import Metrics, run_id
from sage_grpo.callbacks.observers import (
    BestWeightsSaver,
    CheckpointSaver,
    MetricsWriter,
    UserCallbacks,
    VideoFolder,
    VideoSaver,
)
from sage_grpo.callbacks.terminal import Outlet, Terminal, iteration_line, outliving_output
from sage_grpo.distributed import checkpoint
from sage_grpo.training.events import CheckpointEvent, EvaluationEvent, Hooks, IterationEvent, SentinelEvent
from sage_grpo.types import Sound
from sage_grpo.utils.clock import Clock
from sage_grpo.utils.video import read_sound


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    keep = SimpleNamespace(checkpoint_every=3, checkpoints=2, videos_every=2, videos=1)
    videos = torch.arange(2 * 3 * 16 * 16 * 3).reshape(2, 3, 16, 16, 3).to(torch.uint8)
    return SimpleNamespace(
        config=SimpleNamespace(out=str(tmp_path), keep=keep, iterations=5), clock=Clock(),
        state=SimpleNamespace(iteration=4, best={}, sentinel=SimpleNamespace(doubts=[], good=7)),
        world=SimpleNamespace(is_main=True, from_main=lambda text: text, barrier=lambda: None, any=bool),
        model=SimpleNamespace(video=SimpleNamespace(fps=8.0)),
        clips=SimpleNamespace(videos=videos, captions=["a", "b"], sound=None), scores=SimpleNamespace(report=""),
    )  # fmt: skip


class Said:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str | None]] = []

    def say(self, text: str, *, style: str | None = None) -> None:
        self.lines.append((text, style))


def found(total: float) -> Any:
    return SimpleNamespace(metrics={"eval/total": total}, best=False)


def test_the_best_weights_are_of_the_highest_total_that_nobody_doubts(trainer: Any, tmp_path: Path) -> None:
    said, exported = Said(), []
    trainer.export = lambda folder: exported.append((folder, trainer.state.iteration))
    best = BestWeightsSaver(trainer, said, tmp_path / "best")  # type: ignore[arg-type]
    for number, total, doubts, now in (
        (0, 1.0, [], 0), (1, math.nan, [], 0), (2, 1.0, [], 0), (3, 1.5, [], 3), (4, 2.0, ["hacking", "drift"], 3), (5, 1.75, [], 5),
    ):  # fmt: skip
        trainer.state.iteration, trainer.state.sentinel.doubts = number, doubts
        row = found(total)
        best.evaluated(row)
        assert trainer.state.best["iteration"] == now
        assert row.best == (now == number)
    assert trainer.state.best == {"iteration": 5, "score": 1.75}
    assert exported == [(tmp_path / "best", 3), (tmp_path / "best", 5)]
    ((text, style),) = said.lines
    assert text.startswith("The held-out total of 2 after iteration 4 is the highest so far, but best/ is not taken")
    assert style == "yellow"
    assert "(hacking, drift)" in text
    assert [(event["kind"], event["iteration"]) for event in read_events(tmp_path)] == [("best", 4)]

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    trainer.export, waited = full, []
    trainer.world.barrier = lambda: waited.append(1)
    best.evaluated(found(9.0))
    assert (trainer.state.best["iteration"], waited) == (5, [1])
    assert "could not be written (OSError: [Errno 28] No space left). The run continues." in said.lines[-1][0]
    assert said.lines[-1][1] == "yellow"


def test_checkpoints_are_due_on_the_beat_at_the_end_and_at_a_stop(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    pruned, saved = [], []
    monkeypatch.setattr(checkpoint, "prune", lambda *words, **named: pruned.append((words, named)))
    trainer.save = lambda *words: saved.append(words) or tmp_path / "000004"
    journal = Journal(tmp_path / "m.jsonl")
    journal.write(1, {"a": 1.0})
    saver = CheckpointSaver(trainer, tmp_path, {"code": "x"}, Metrics((), journal))
    assert [saver.due(n, last=False, stopping=False) for n in (1, 2, 3, 4, 6)] == [False, False, True, False, True]
    assert saver.due(1, last=True, stopping=False)
    assert saver.due(1, last=False, stopping=True)
    assert saver.save(needed=False) == tmp_path / "000004"
    assert saved == [(tmp_path, {"identity": {"code": "x"}}, {"metrics.jsonl": (tmp_path / "m.jsonl").read_bytes()})]
    trainer.world.is_main = False
    saver.prune()
    assert pruned == [((tmp_path, 2, 4), {"spare": 7})]
    assert Metrics().rows == b""


def test_a_program_hears_of_checkpoints_and_of_the_sentinel(trainer: Any, tmp_path: Path) -> None:
    heard: list[Any] = []
    hooks = Hooks(iteration=heard.append, checkpoint=heard.append, sentinel=heard.append)
    callbacks, event = UserCallbacks(trainer, hooks, None), SentinelEvent(4, "drift", "it drifts", "warn")  # type: ignore[arg-type]
    callbacks.after({"a": 1.0})
    callbacks.saved(tmp_path / "000004")
    callbacks.health_event(event)
    assert heard[1:] == [CheckpointEvent(4, tmp_path / "000004"), event]
    assert (heard[0].iteration, heard[0].metrics, heard[0].prompts) == (4, {"a": 1.0}, ["a", "b"])
    assert heard[0].videos is trainer.clips.videos
    assert isinstance(heard[0], IterationEvent)
    assert callbacks.shows(1)
    assert not UserCallbacks(trainer, Hooks(), None).shows(1)  # type: ignore[arg-type]
    said = Said()
    rows = MetricsWriter(trainer, Metrics(), said)  # type: ignore[arg-type]
    rows.health_event(event)
    rows.health_event(replace(event, action="stop"))
    assert said.lines == [("sentinel: drift: it drifts", "yellow"), ("sentinel: it drifts", "yellow")]
    assert [one["text"] for one in read_events(tmp_path)] == ["drift: it drifts", "it drifts"]


def test_every_row_is_shown_and_failed_rewards_are_named(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    terminal: Any = Said()
    terminal.iteration = terminal.evaluation = lambda *row: terminal.lines.append(row)
    trainer.scores.report = "2 of 8 clips of 猫 failed"
    monkeypatch.setattr("sage_grpo.callbacks.journal.time", SimpleNamespace(time=lambda: 1234.56789))
    written: list[Any] = []
    metrics: Any = SimpleNamespace(write=lambda number, row: written.append(row))
    writer = MetricsWriter(trainer, metrics, terminal)
    writer.after({"a": 1.0})
    writer.evaluated(SimpleNamespace(metrics={"eval/b": 2.0}, extra={"c": 1.0}, report=""))  # type: ignore[arg-type]
    assert written == [{"a": 1.0}, {"eval/b": 2.0, "c": 1.0}]
    assert terminal.lines == [(4, {"a": 1.0}), (trainer.scores.report, "yellow"), (4, {"eval/b": 2.0})]
    event = {"time": 1234.568, "kind": "failed", "iteration": 4, "text": trainer.scores.report}
    assert read_events(tmp_path) == [event]
    assert trainer.scores.report in (tmp_path / "events.jsonl").read_text(encoding="utf-8"), "people read it"


def test_clips_are_saved_with_their_scores_and_their_sound(trainer: Any, tmp_path: Path) -> None:
    clips = torch.zeros(2, 3, 16, 32, 3, dtype=torch.uint8)
    sound = Sound(torch.ones(2, 1, 8000) * torch.tensor([0.5, -0.5])[:, None, None], 16000)
    rows = [{"prompt": "a", "scores": {}, "clip": 1}, {"prompt": "b", "scores": {}, "clip": None}]
    files = VideoFolder(tmp_path, megabytes=9).save("heldout-000001", clips, ["a\n b", "c"], 8.0, rows, sound)
    assert [file.name for file in files] == ["heldout-000001-00.mp4", "heldout-000001-01.mp4"]
    assert (tmp_path / "heldout-000001.txt").read_text() == "a b\nc\n"
    named = [{**rows[0], "clip": files[1].name}, rows[1]]
    found = json.loads((tmp_path / "heldout-000001.json").read_text())
    assert found == {"fps": 8.0, "frames": 3, "height": 16, "width": 32, "rows": named, "sound": True}
    heard = [read_sound(file) for file in files]
    assert [round(float(one.waves[:, 3000:5000].mean()), 1) for one in heard if one] == [0.5, -0.5]
    trainer.clips.sound, saved = sound, []
    samples: Any = SimpleNamespace(folder=tmp_path, save=lambda *words: saved.append(words) or [])
    VideoSaver(trainer, samples, None).after({})  # type: ignore[arg-type]
    assert (saved[0][0], saved[0][2:5]) == ("rollout-000004", (["a"], 8.0, ()))
    assert saved[0][5].waves.shape == (1, 1, 8000)
    names = [type(one).__name__ for one in observers.observers_of(trainer, None, None, None, None, None)]  # type: ignore[arg-type]
    assert names == ["MetricsWriter", "VideoSaver", "BestWeightsSaver", "UserCallbacks"]


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    first = run_id(tmp_path, resumed=False)
    assert len(first) == 8
    assert run_id(tmp_path, resumed=True) == first
    for text, good in (("x" * 128, True), ("x" * 129, False), ("", False), ("a\tb", False)):
        (tmp_path / ".run_id").write_text(text)
        if good:
            assert run_id(tmp_path, resumed=False) == text
        else:
            with pytest.raises(ValueError, match="does not hold the id"):
                run_id(tmp_path, resumed=False)


ROW = {"reward/total": 1.0, "gradient/norm": 2.0, "time/total": 30.0}


def test_a_line_of_a_terminal_loses_the_least_important_first() -> None:
    crew = {"crew/workers": 1e3, "crew/waited_s": 1.0, "kl/position": 1.0}
    line = iteration_line(99999, 100000, {**ROW, **crew, "kl/total": 1.0}, 1.0)
    assert len(line) <= 80
    assert "1000 workers  waited 1.0 s  30.0 s" in line
    assert "  2 old  " in iteration_line(1, 9, {**ROW, "crew/staleness": 2.0}, 1.0)


def test_held_out_scores_are_as_few_lines_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {f"eval/reward_{number}": 0.123 for number in range(20)}
    Terminal(enabled=True, progress=False, total=1).evaluation(3, scores | {"eval/total": 1.0, "eval/failed": 0.0})
    shown = capsys.readouterr().out
    assert 60 < max(map(len, shown.splitlines())) <= 80
    words = ["held-out", "after", "3", "total", "1.000"]
    assert shown.split() == [*words, *(word for number in range(20) for word in (f"reward_{number}", "0.123"))]


@pytest.mark.filterwarnings("ignore:.*cannot be written any more")
def test_a_run_in_a_thread_writes_to_the_same_terminal_while_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []

    def say() -> None:
        Terminal(enabled=True, progress=True, total=1).say("from a thread [bold]")
        said.append(True)

    for stream in (sys.stdout, closed := io.StringIO()):
        closed.close()
        monkeypatch.setattr(sys, "stdout", stream)
        thread = threading.Thread(target=say)
        thread.start()
        thread.join()
    monkeypatch.undo()
    assert capsys.readouterr().out == "from a thread [bold]\n"
    assert said == [True, True]


def test_an_outlet_shows_what_it_can_and_knows_whether_a_person_looks() -> None:
    raw = io.BytesIO()
    outlet = Outlet(io.TextIOWrapper(raw, encoding="ascii"))
    assert outlet.write("0.5 ± 0.1\n") == 10
    outlet.flush()
    assert raw.getvalue() == b"0.5 ? 0.1\n"
    screen = SimpleNamespace(isatty=lambda: True, closed=False)
    assert Outlet(screen).isatty()
    for look, closed in ((False, False), (True, True)):
        assert not Outlet(SimpleNamespace(isatty=lambda look=look: look, closed=closed)).isatty()
    assert not Outlet(None).isatty()
    assert Outlet(SimpleNamespace(fileno=lambda: 7)).fileno() == 7
    assert Outlet(None).write("lost") == 4


def test_clips_are_saved_on_the_beat_and_at_the_end_and_shown_where_they_are(trainer: Any, tmp_path: Path) -> None:
    shown: list[Any] = []
    metrics: Any = SimpleNamespace(show=lambda number, clips: shown.append((number, clips)))
    videos = VideoSaver(trainer, VideoFolder(tmp_path, megabytes=9), metrics)
    assert [number + 1 for number in range(5) if videos.shows(number)] == [2, 4, 5]
    for number in range(1, 6):
        trainer.state.iteration = number
        videos.after({})
    assert sorted(file.name for file in tmp_path.glob("*.mp4")) == [f"rollout-00000{n}-00.mp4" for n in (2, 4, 5)]
    rows = [
        {"prompt": "p", "scores": {"TA": worth}, "clip": place} for worth, place in ((0.1, 1), (0.2, None), (0.3, 0))
    ]
    result = SimpleNamespace(clips=trainer.clips.videos, captions=["c", "d"], rows=rows, sound=None)
    videos.evaluated(result)  # type: ignore[arg-type]
    ((number, clips),) = shown
    assert (number, clips.name, clips.captions, clips.fps) == (5, "held_out", ["c", "d"], 8.0)
    assert torch.equal(clips.pixels, trainer.clips.videos)
    assert [file.name for file in clips.files] == ["heldout-000005-00.mp4", "heldout-000005-01.mp4"]
    assert all(file.is_file() for file in clips.files)
    assert clips.scores == [{"TA": 0.3}, {"TA": 0.1}]
    trainer.world.is_main = False
    assert not any(videos.shows(number) for number in range(5))


def test_what_a_callback_raises_saves_the_run_first_unless_it_is_saved(trainer: Any, tmp_path: Path) -> None:
    def fails(event: object) -> None:
        raise ZeroDivisionError

    saved: list[bool] = []
    saver: Any = SimpleNamespace(save=lambda needed: saved.append(needed))
    told: list[EvaluationEvent] = []
    callbacks = UserCallbacks(trainer, Hooks(evaluation=told.append), saver)
    clips = trainer.clips.videos
    result = SimpleNamespace(metrics={"eval/total": 1.0}, clips=clips, captions=["a", "b"], best=True)
    callbacks.evaluated(result)  # type: ignore[arg-type]
    (event,) = told
    assert (event.iteration, event.metrics, event.prompts, event.best) == (4, {"eval/total": 1.0}, ["a", "b"], True)
    assert event.videos is clips
    for iteration, event, done in (
        (4, IterationEvent(4, {}, clips, []), [False]),
        (4, CheckpointEvent(4, tmp_path), []),
        (0, IterationEvent(0, {}, clips, []), []),  # before the first there is nothing to save
    ):
        trainer.state.iteration = iteration
        with pytest.raises(ZeroDivisionError):
            callbacks._call(fails, event)
        assert saved == done
        saved.clear()
    trainer.world = SimpleNamespace(is_main=False, any=bool)
    callbacks._call(fails, IterationEvent(2, {}, clips, []))  # another rank calls nothing


def test_output_is_flushed_at_the_end_of_a_run_and_the_streams_are_as_they_were(monkeypatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    with outliving_output():
        outlet = sys.stdout
        assert isinstance(outlet, Outlet)
        print("said")
        assert raw.getvalue() == b""
    assert raw.getvalue() == b"said\n"
    assert sys.stdout is stream
    stream.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outlet.write("a logger's last words")


STRANGERS = ("favourite.mp4", "rollout-notes.txt", "heldout-000001-00.mp4.bak", "rollout-12-00.mp4")


def put(folder: Path, name: str, second: int) -> None:
    (folder / name).write_bytes(bytes(1000))
    os.utime(folder / name, ns=(second * 10**9, second * 10**9))


def test_rollouts_go_before_held_out_clips_and_those_before_training_last(tmp_path: Path) -> None:
    own = ["heldout-000000-00.mp4", "heldout-000001-00.mp4", "rollout-000002-00.mp4", "rollout-000001.txt"]
    own.append("heldout-000002.txt")
    for name in STRANGERS:
        put(tmp_path, name, 0)
    for second, name in enumerate(own, 1):
        put(tmp_path, name, second)
    samples = VideoFolder(tmp_path, megabytes=0.005)
    for count, gone in ((5, None), (4, own[2]), (3, own[3]), (2.5, own[1]), (1, own[4]), (0, own[0])):
        samples.budget = 1000 * count
        samples.prune()
        own = [name for name in own if name != gone]
        assert {file.name for file in tmp_path.iterdir()} == {*own, *STRANGERS}


def test_a_budget_holds_while_clips_are_saved(tmp_path: Path) -> None:
    for budget, kept in ((1.0, {"heldout-000001-00.mp4", "heldout-000001.txt"}), (0.0, set())):
        clips = torch.zeros(1, 2, 16, 16, 3, dtype=torch.uint8)
        VideoFolder(tmp_path, megabytes=budget).save("heldout-000001", clips, ["a"], 8.0)
        assert {file.name for file in tmp_path.iterdir()} == kept


def test_a_clock_tells_its_listener_and_adds_up_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("sage_grpo.utils.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    cuda = {"is_available": lambda: True, "max_memory_allocated": lambda: 3 << 29}
    for name in ("reset_peak_memory_stats", "synchronize", *cuda):
        monkeypatch.setattr(torch.cuda, name, cuda.get(name, lambda: None))
    clock = Clock(lambda *seen: told.append(seen))
    for seconds in (2.0, 3.0):
        with clock("rollout"):
            tick = clock.ticker(2)
            tick()
            tick()
            now[0] += seconds
    assert told == [("rollout", 0, 1), ("rollout", 1, 2), ("rollout", 2, 2)] * 2
    assert clock.report() == {"time/rollout": 5.0, "time/total": 5.0, "time/peak_gib_rollout": 1.5}
    assert clock.report() == {"time/total": 0}


def test_an_evaluation_says_how_far_it_is_where_no_bar_does(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr("sage_grpo.utils.text.time.monotonic", lambda: now[0])
    terminal = Terminal(enabled=True, progress=True, total=9)
    for now[0], phase, done in ((50, "evaluate", 0), (60, "evaluate", 1), (80, "decode", 2), (80, "evaluate", 2)):
        terminal.listen(phase, done, 8)
    assert capsys.readouterr().out == "evaluation: 2/8 micro-batches, 90 s left\n"
    for number, seconds in ((1, 10.0), (2, 20.0)):
        terminal.iteration(number, {**ROW, "time/total": seconds})
    assert capsys.readouterr().out.endswith("2/9  reward 1.000  kl skipped  grad 2  20.0 s  2 min left\n")
    terminal.start_at(5)
    assert [task.completed for task in terminal._progress.tasks] == [5, 2]
