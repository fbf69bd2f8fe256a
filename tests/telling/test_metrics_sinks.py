"""TensorBoard gets scalars and moving pictures, trackers what they can take; one that fails does not end a run."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import needs
from sage_grpo.folder.journal import Journal, read_rows
from sage_grpo.telling.metrics import Metrics, ShownClips, TensorBoard
from sage_grpo.telling.observers import Samples
from sage_grpo.training.config import LogConfig


def test_json_has_no_nan(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    Journal(file).write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})

    def refuse(token: str) -> None:
        raise AssertionError(token)

    row = json.loads(file.read_text(), parse_constant=refuse)
    assert row == {"iteration": 1, "a": None, "b": None, "c": None, "d": 1.5}


def test_tensorboard_holds_scalars_and_an_animation(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, purge_from=None)
    board.write(1, {"reward/total": 0.25})
    board.write(2, {"reward/total": 0.5})
    clips = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    board.show(2, ShownClips("held_out", clips, ["a", "b"], 8.0))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/total")] == [(1, 0.25), (2, 0.5)]
    (picture,) = events.Images("held_out")
    assert picture.step == 2
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(picture.encoded_image_string)) as image:
        assert image.format == "GIF"
        assert image.n_frames == 3
        assert image.width == 2 * image.height  # two clips side by side


def test_tensorboard_forgets_what_is_computed_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for purge, value in ((None, 1.0), (3, 2.0)):
        board = TensorBoard(tmp_path, purge_from=purge)
        for iteration in range(purge or 1, 5):
            board.write(iteration, {"a": value})
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_run_that_starts_anew_hides_the_events_of_one_that_never_got_to_a_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):
        board = TensorBoard(tmp_path, purge_from=0)
        board.write(0, {"a": value})
        board.write(1, {"a": value})
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(0, 2.0), (1, 2.0)]


def test_tensorboard_goes_on_in_another_file_when_there_is_room_again(tmp_path: Path) -> None:
    """/dev/full is a disk without room."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, purge_from=0)
    board.write(1, {"a": 1.0})
    board.close()
    with (
        Path("/dev/full").open("wb", buffering=1 << 16) as board._stream,
        pytest.raises(OSError, match="No space left"),
    ):
        board.write(2, {"a": 2.0})
    board.write(3, {"a": 3.0})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (3, 3.0)]


class Moody:
    """A logger that raises while its mood is bad."""

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
    first, second = Moody(), Moody()
    metrics = Metrics([first, second], Journal(tmp_path / "m.jsonl"))
    first.bad = True
    with pytest.warns(
        UserWarning, match=r"Logging iteration 1 to Moody failed \(ConnectionError: the tracker's machine is gone"
    ):
        metrics.write(1, {"a": 1.0})
    first.bad = False
    metrics.write(2, {"a": 2.0})
    assert (first.rows, second.rows) == ([2], [1, 2])
    assert [row["iteration"] for row in read_rows(tmp_path / "m.jsonl")] == [1, 2]
    first.bad, first.calls = True, 0
    for iteration in range(3, 7):
        metrics.write(iteration, {"a": 1.0})
    with pytest.warns(UserWarning, match="Moody failed 5 times in a row: no more is logged to it"):
        metrics.write(7, {"a": 1.0})
    for iteration in range(8, 20):
        metrics.write(iteration, {"a": 1.0})
    assert first.calls == 5
    assert second.rows == list(range(1, 20))
    with pytest.warns(UserWarning, match=r"Closing Moody failed \(RuntimeError: too late"):
        metrics.close()


def open_sinks(out: Path, **log: str) -> Metrics:
    out.mkdir()
    config = LogConfig(tensorboard=False, **log)
    return Metrics.open(out, config, {"seed": 0}, journal=Journal(out / "metrics.jsonl"), resumed_at=None)


def logged(metrics: Metrics, out: Path) -> list[Path]:
    """Two rows and two clips; returns the clips' files."""
    clips = torch.randint(0, 256, (2, 5, 32, 32, 3), dtype=torch.uint8)
    files = Samples(out / "videos", megabytes=10).save("heldout-000001", clips, ["a", "b"], 8.0)
    metrics.write(1, {"reward/total": 0.5})
    metrics.show(1, ShownClips("held_out", clips, ["a", "b"], 8.0, files))
    metrics.close()
    return files


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

    module = SimpleNamespace(init=init, Video=video, errors=SimpleNamespace(Error=FakeError), logs=logs)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_without_a_key_logs_offline_and_gets_the_files(fake_wandb: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot log in \(FakeError: No API key.*logged offline"):
        metrics = open_sinks(tmp_path / "run", wandb="project")
    files = logged(metrics, tmp_path / "run")
    videos = [file.read_bytes() for file in files]
    assert fake_wandb.logs == [
        {"reward/total": 0.5, "iteration": 1}, {"held_out": videos, "iteration": 1}, {"finished": True},
    ]  # fmt: skip


def test_a_tracker_that_cannot_start_is_left_out(
    fake_wandb: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options):
        raise RuntimeError("its service did not start")

    monkeypatch.setattr(fake_wandb, "init", init)
    with pytest.warns(UserWarning, match=r"Starting wandb failed \(RuntimeError: its service did not start"):
        metrics = open_sinks(tmp_path / "run", wandb="project")
    metrics.write(1, {"a": 1.0})
    assert metrics.sinks == []


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without keys and settings, and a tracker's folder of their own; what a tracker adds to the environment goes with it."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "home" / "trackio"))
    (tmp_path / "home").mkdir()
    yield
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        os.environ.pop(name)


@pytest.mark.slow
@pytest.mark.usefixtures("nobody")
def test_the_real_wandb_logs_offline(tmp_path: Path) -> None:
    needs.module("wandb")
    with pytest.warns(UserWarning, match="logged offline"):
        metrics = open_sinks(tmp_path / "run", wandb="project")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*failed")  # ours, when a sink raises
        files = logged(metrics, tmp_path / "run")
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    kept = {file.read_bytes() for file in (run / "files" / "media" / "videos").glob("*.mp4")}
    assert kept == {file.read_bytes() for file in files}


@pytest.mark.usefixtures("nobody")
def test_the_real_trackio_keeps_the_rows(tmp_path: Path) -> None:
    needs.module("trackio")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*failed")
        logged(open_sinks(tmp_path / "run", trackio="project"), tmp_path / "run")
    (database,) = (tmp_path / "home").rglob("project.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert [(run, step, json.loads(metrics)) for run, step, metrics in rows] == [("run", 1, {"reward/total": 0.5})]


@pytest.mark.parametrize("extra", ["wandb", "trackio"])
def test_a_missing_tracker_names_its_extra(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ValueError, match=rf"pip install 'sage-grpo\[{extra}\]'"):
        open_sinks(tmp_path / "run", **{extra: "project"})
