"""TensorBoard gets scalars, trackers what they can take; a run outlives these, its disk and its terminal."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sage_grpo.callbacks.observers as samples_module
import trainer_toys
from documents import blocks
from sage_grpo.callbacks.journal import Journal, read_rows
from sage_grpo.callbacks.metrics import Metrics, ShownClips, TensorBoard
from sage_grpo.run.session import run as train
from sage_grpo.training.config import KeepConfig, LogConfig


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_run_that_starts_anew_hides_the_events_of_one_that_never_got_to_a_checkpoint(tmp_path: Path) -> None:
    for purge, value in ((0, 1.0), (0, 2.0), (2, 3.0)):  # the last goes on after iteration 1
        board = TensorBoard(tmp_path, purge_from=purge)
        for iteration in range(purge, 4):
            board.write(iteration, {"a": value})
        board.close()
        assert getattr(board._stream, "closed", False)
    assert scalars(tmp_path, "a") == [(0, 2.0), (1, 2.0), (2, 3.0), (3, 3.0)]


def test_tensorboard_goes_on_in_another_file_when_there_is_room_again(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "run" / "tensorboard", purge_from=0)
    board.write(1, {"a": 1.0})
    board.close()
    no_room = pytest.raises(OSError, match="No space left")
    with Path("/dev/full").open("wb", buffering=1 << 16) as board._stream, no_room:
        board.write(2, {"a": 2.0})
    board.write(3, {"a": 3.0})
    board.close()
    assert scalars(board.folder, "a") == [(1, 1.0), (3, 3.0)]


class Moody:
    def __init__(self) -> None:
        self.bad, self.rows, self.calls = False, [], 0

    def write(self, iteration: int, metrics: dict) -> None:
        self.calls += 1
        if self.bad:
            raise ConnectionError("the tracker's machine is gone")
        self.rows.append(iteration)

    def show(self, iteration: int, clips: ShownClips) -> None:
        self.write(iteration, {})

    def close(self) -> None:
        raise RuntimeError("too late")


@pytest.mark.filterwarnings("ignore:Logging iteration")
def test_a_logger_that_raises_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    first, second = Moody(), type("Calm", (Moody,), {})()
    metrics = Metrics([first, second], Journal(tmp_path / "m.jsonl"))
    first.bad = True
    with pytest.warns(UserWarning, match="Logging iteration 1 to Moody failed .*the tracker's machine is gone"):
        metrics.write(1, {"a": 1.0})
    first.bad = False
    metrics.write(2, {"a": 2.0})
    assert [row["iteration"] for row in read_rows(tmp_path / "m.jsonl")] == second.rows == [1, 2]
    first.bad, first.calls = True, 0
    for iteration in range(3, 7):
        metrics.write(iteration, {"a": 1.0})
    with pytest.warns(UserWarning, match="^Moody failed 5 times in a row: no more is logged to it"):
        metrics.write(7, {"a": 1.0})
    for iteration in range(8, 20):
        metrics.write(iteration, {"a": 1.0})
    assert (first.calls, first.rows) == (5, [2])
    assert second.rows == list(range(1, 20))
    with pytest.warns(UserWarning, match=r"Closing Moody failed \(RuntimeError: too late"):
        metrics.close()


def open_sinks(out: Path, resumed_at: int | None = None, **log: Any) -> Metrics:
    out.mkdir(parents=True, exist_ok=True)
    config = LogConfig(**{"tensorboard": False, **log})
    return Metrics.open(out, config, {"seed": 0}, journal=Journal(out / "metrics.jsonl"), resumed_at=resumed_at)


class FakeError(Exception):
    """wandb.errors.Error."""


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of wandb as is used, without a key: like it, it fails unless it is offline, and it wants moviepy for pixels."""
    logs: list[dict] = []

    def init(mode: str | None = None, **options):
        if mode != "offline":
            assert not sys.stdin.isatty()
            raise FakeError("No API key configured. Use `wandb login` to log in.")
        return SimpleNamespace(log=logs.append, finish=lambda: logs.append({"finished": True}))

    def video(given, caption=None, format=None):
        if not isinstance(given, str):
            raise FakeError("wandb.Video requires moviepy when passing raw data")
        return Path(given).read_bytes()

    module = SimpleNamespace(init=init, Video=video, Table=dict, errors=SimpleNamespace(Error=FakeError), logs=logs)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_without_a_key_logs_offline_and_gets_the_files(fake_wandb: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot log in \(FakeError: No API key.*logged offline"):
        metrics = open_sinks(tmp_path / "run", wandb="project")
    file = tmp_path / "a.mp4"
    file.write_bytes(b"clip")
    metrics.write(1, {"reward/total": 0.5})
    clips = ShownClips("held_out", torch.zeros(1, 1, 8, 8, 3), ["a"], 8.0, [file])
    metrics.show(1, clips)
    metrics.show(2, replace(clips, scores=[{"TA": 0.25, "total": None}]))
    metrics.close()
    table = {"columns": ["prompt", "clip", "TA", "total"], "data": [["a", b"clip", 0.25, None]]}
    logs = [
        {"reward/total": 0.5, "iteration": 1},
        {"held_out": [b"clip"], "iteration": 1},
        {"held_out": [b"clip"], "iteration": 2, "held_out_scores": table},
        {"finished": True},
    ]
    assert fake_wandb.logs == logs


def test_the_sink_for_swanlab_that_the_page_shows(monkeypatch, tmp_path: Path) -> None:
    """It runs here against a stand-in with the calls of swanlab's own page."""
    logs: list[Any] = []
    run = SimpleNamespace(log=lambda data, step: logs.append((step, data)), finish=lambda: logs.append("finished"))
    swanlab = SimpleNamespace(init=lambda project, experiment_name, logdir, config: logs.append(experiment_name) or run)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    (block,) = (block for block in blocks("python") if block.text.startswith("# swan.py"))
    (tmp_path / "swan.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    metrics = open_sinks(tmp_path / "warm", sinks=["swan:SwanLab"])
    metrics.write(1, {"reward/total": 0.5})
    metrics.show(1, ShownClips("held_out", torch.zeros(1, 1, 8, 8, 3), ["a"], 8.0))
    metrics.close()
    assert logs == ["warm", (1, {"reward/total": 0.5}), "finished"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    tracker = SimpleNamespace(init=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    return calls


def test_a_run_is_one_run_at_its_tracker_and_no_other(tmp_path: Path, started) -> None:
    for folder, resumed in (("a", None), ("b", None), ("a", 3)):
        open_sinks(tmp_path / folder / "smoke", resumed, wandb="p")
    first, second, again = (options["id"] for options in started)
    assert first == again != second
    for resumed in (3, 5):
        open_sinks(tmp_path / "old" / "smoke", resumed, wandb="p")
    assert [options["id"] for options in started[3:]] == ["smoke", "smoke"]
    boards: list[Any] = [open_sinks(tmp_path, at, tensorboard=True).sinks[0] for at in (None, 3)]
    assert [board._purge for board in boards] == [0, 4], "what comes after is computed again"


def test_trackers_get_the_names_of_the_configuration(tmp_path: Path, started) -> None:
    open_sinks(tmp_path / "run", wandb="p", name="warm", group="g", entity="team", tags=["a", "b"])
    (first,) = started
    assert {key: first[key] for key in ("project", "name", "group", "entity", "tags")} == {
        "project": "p", "name": "warm", "group": "g", "entity": "team", "tags": ["a", "b"]
    }  # fmt: skip


@pytest.mark.parametrize("spoil", [Path.mkdir, os.mkfifo, lambda file: file.write_text("x" * 10**6)])
def test_what_is_not_the_id_of_a_run_is_refused(spoil, tmp_path: Path, started) -> None:
    (tmp_path / "run").mkdir()
    spoil(tmp_path / "run" / ".run_id")
    with pytest.raises(ValueError, match=r"\.run_id (does not hold the id of a run|is a pipe)"):
        open_sinks(tmp_path / "run", wandb="p")


class Closing(io.StringIO):
    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error, self.left = error, after

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(("error", "after"), [(BrokenPipeError(), 3), (ValueError("I/O on closed file"), 0)])
def test_output_that_cannot_be_written(error: Exception, after: int, make_config, monkeypatch) -> None:
    config = make_config(iterations=1)
    monkeypatch.setattr(sys, "stdout", Closing(error, after))
    with pytest.warns(UserWarning, match="cannot be written any more .*: the run continues without it"):
        train(config)
    assert [row["iteration"] for row in read_rows(Path(config.out) / "metrics.jsonl")] == [0, 1, 1]
    assert (Path(config.out) / "final").is_dir()


def test_a_lost_terminal_saves_and_leaves(make_config, monkeypatch, capsys) -> None:
    config = make_config(iterations=2, keep=KeepConfig(checkpoint_every=100, videos_every=0))
    bright, calls = trainer_toys.bright, []

    def hung_up(videos, prompts, fps):
        calls.append(1)
        if len(calls) == 3:  # the first is the reward's try-out
            signal.raise_signal(signal.SIGHUP)  # in this thread: its handler has run when this returns
        return bright(videos, prompts, fps)

    hung_up.__name__ = "bright"
    monkeypatch.setattr(trainer_toys, "bright", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that were started with nohup ignore it
    try:
        train(config)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [folder.name for folder in (Path(config.out) / "checkpoints").iterdir()] == ["000001"]
    told = " ".join(capsys.readouterr().out.split())
    assert "Stopped by signal after iteration 1; saved" in told
    assert "rollouts 2 prompts x 4 = 8 clips per iteration" in told


def test_a_full_disk_for_videos_and_tensorboard(make_config, monkeypatch, tmp_path: Path) -> None:
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(samples_module, "write_mp4", full)
    monkeypatch.setattr(TensorBoard, "write", full)
    config = make_config(iterations=1, keep=KeepConfig(videos_every=1), log=LogConfig(progress=False))
    with pytest.warns(UserWarning, match="The run continues") as warned:
        train(config)
    said = "\n".join(str(warning.message) for warning in warned)
    for what in (f"Saving videos to {tmp_path}/run/videos", "Logging iteration 1 to TensorBoard"):
        assert f"{what} failed (OSError: [Errno 28] No space left on device). The run continues." in said
    assert (Path(config.out) / "final").is_dir()
