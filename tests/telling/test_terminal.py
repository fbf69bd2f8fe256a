"""What an iteration and an evaluation say, and which clips are saved and shown: in the terminal, in files and to the loggers."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.printing import minutes
from sage_grpo.telling.events import CheckpointEvent, EvaluationEvent, Hooks, IterationEvent
from sage_grpo.telling.observers import Callbacks, Rows, Samples, Videos
from sage_grpo.telling.terminal import Outlet, Terminal, iteration_line, lines_of, outliving_output

ROW = {"reward/total": 1.0, "gradient/norm": 2.0, "time/total": 30.0}


def test_an_evaluation_names_its_scores_the_total_first(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"eval/VQ": 0.25, "eval/total": 1.5, "eval/TA/size": 9.0, "eval/failed": 0.0, "eval/total_stderr": 0.1}
    Terminal(enabled=True, progress=False, total=9).evaluation(3, row)
    assert capsys.readouterr().out == "held-out after 3  total 1.500  VQ 0.250\n"
    Terminal(enabled=False, progress=False, total=9).evaluation(3, row)
    assert capsys.readouterr().out == ""


def test_what_is_left_is_told_from_the_last_ten_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(enabled=True, progress=False, total=100)
    for number in range(1, 21):
        terminal.iteration(number, {**ROW, "time/total": 1e6 if number <= 10 else 30.0 + number % 2})
    line, (run, _) = capsys.readouterr().out.splitlines()[-1], terminal._progress.tasks
    assert (run.completed, run.total, run.fields["note"]) == (20, 100, "reward 1.000")
    assert line == f"20/100  reward 1.000  kl skipped  grad 2  30.0 s  {minutes(30.5 * 80)} left"


def test_a_line_of_a_terminal_loses_the_least_important_first() -> None:
    crew = {"crew/workers": 1e3, "crew/idle_s": 1.0, "crew/busy_s": 3.0, "crew/queue": 2.0, "kl/position": 1.0}
    line = iteration_line(99999, 100000, {**ROW, **crew, "kl/total": 1.0}, 1.0)
    assert len(line) <= 80
    assert "workers" in line
    assert "grad" not in line
    parts = [f"reward_{number} 0.123" for number in range(20)]
    assert max(map(len, lines_of(["held-out", *parts]))) <= 80
    assert " ".join(lines_of(["held-out", *parts])).split() == ["held-out", *" ".join(parts).split()]


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


def trainer_of(out: Path, **more: Any) -> Any:
    """As much of a trainer as observers ask."""
    keep = SimpleNamespace(videos_every=2, videos=1)
    return SimpleNamespace(
        config=SimpleNamespace(keep=keep, iterations=5, out=str(out)), state=SimpleNamespace(iteration=2), failures="",
        world=SimpleNamespace(is_main=True, any=bool), model=SimpleNamespace(video=SimpleNamespace(fps=8.0)),
        videos=torch.arange(2 * 3 * 16 * 16 * 3).reshape(2, 3, 16, 16, 3).to(torch.uint8), captions=["a", "b"], sound=None, **more,
    )  # fmt: skip


def test_clips_are_saved_on_the_beat_and_at_the_end_and_shown_where_they_are(tmp_path: Path) -> None:
    trainer, shown = trainer_of(tmp_path), []
    metrics: Any = SimpleNamespace(show=lambda number, clips: shown.append((number, clips)))
    videos = Videos(trainer, Samples(tmp_path, megabytes=9), metrics)
    assert [number + 1 for number in range(5) if videos.shows(number)] == [2, 4, 5]
    for number in range(1, 6):
        trainer.state.iteration = number
        videos.after({})
    assert sorted(file.name for file in tmp_path.glob("*.mp4")) == [f"rollout-00000{n}-00.mp4" for n in (2, 4, 5)]
    result = SimpleNamespace(clips=trainer.videos, captions=["c", "d"], rows=(), sound=None)
    videos.evaluated(SimpleNamespace(result=result))  # type: ignore[arg-type]
    ((number, clips),) = shown
    assert (number, clips.name, clips.captions, clips.fps) == (5, "held_out", ["c", "d"], 8.0)
    assert torch.equal(clips.pixels, trainer.videos)
    assert [file.name for file in clips.files] == ["heldout-000005-00.mp4", "heldout-000005-01.mp4"]
    assert all(file.is_file() for file in clips.files)
    trainer.world.is_main = False
    assert not any(videos.shows(number) for number in range(5))


def test_a_row_goes_to_the_journal_and_the_terminal_and_failures_are_told(tmp_path: Path) -> None:
    trainer, seen = trainer_of(tmp_path), []
    metrics: Any = SimpleNamespace(write=lambda number, row: seen.append(("written", number, row)))
    terminal: Any = SimpleNamespace(
        iteration=lambda number, row: seen.append(("iteration", number, row)),
        evaluation=lambda number, row: seen.append(("evaluation", number, row)),
        say=lambda text, style: seen.append(("said", text, style)),
    )
    rows = Rows(trainer, metrics, terminal)
    rows.after({"a": 1.0})
    trainer.failures = "one reward failed"
    rows.after({"a": 2.0})
    result = SimpleNamespace(metrics={"eval/total": 1.0}, report="")
    rows.evaluated(SimpleNamespace(metrics={"eval/total": 1.0, "time/total": 3.0}, result=result))  # type: ignore[arg-type]
    assert seen == [
        ("written", 2, {"a": 1.0}), ("iteration", 2, {"a": 1.0}),
        ("written", 2, {"a": 2.0}), ("iteration", 2, {"a": 2.0}), ("said", "one reward failed", "yellow"),
        ("written", 2, {"eval/total": 1.0, "time/total": 3.0}), ("evaluation", 2, {"eval/total": 1.0}),
    ]  # fmt: skip
    assert '"failed"' in (tmp_path / "events.jsonl").read_text()


def test_what_a_callback_raises_saves_the_run_first_unless_it_is_saved(tmp_path: Path) -> None:
    def fails(event: object) -> None:
        raise ZeroDivisionError

    saved: list[bool] = []
    trainer = trainer_of(tmp_path, writer=SimpleNamespace(finish=lambda: saved.append(True)))
    saver: Any = SimpleNamespace(save=lambda needed: saved.append(needed))
    told: list[EvaluationEvent] = []
    callbacks = Callbacks(trainer, Hooks(evaluation=told.append), saver)
    clips = trainer.videos
    result = SimpleNamespace(metrics={"eval/total": 1.0}, clips=clips, captions=["a", "b"])
    callbacks.evaluated(SimpleNamespace(result=result, best=True))  # type: ignore[arg-type]
    (event,) = told
    assert (event.iteration, event.metrics, event.prompts, event.best) == (2, {"eval/total": 1.0}, ["a", "b"], True)
    assert event.videos is clips
    for event, done in (
        (IterationEvent(2, {}, clips, []), [False, True]),
        (CheckpointEvent(2, tmp_path, complete=True), [True]),
    ):
        with pytest.raises(ZeroDivisionError):
            callbacks._call(fails, event)
        assert saved == done
        saved.clear()
    trainer.state.iteration = 0  # before the first there is nothing to save
    with pytest.raises(ZeroDivisionError):
        callbacks._call(fails, IterationEvent(0, {}, clips, []))
    assert saved == [True]
    trainer.world = SimpleNamespace(is_main=False, any=bool)
    callbacks._call(fails, IterationEvent(2, {}, clips, []))  # another rank calls nothing


def test_output_is_flushed_at_the_end_of_a_run_and_the_streams_are_as_they_were(monkeypatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    with outliving_output():
        assert isinstance(sys.stdout, Outlet)
        print("said")
        assert raw.getvalue() == b""
    assert raw.getvalue() == b"said\n"
    assert sys.stdout is stream
