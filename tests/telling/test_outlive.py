"""A run outlives its surroundings: it goes on, or saves and leaves. It never dies unsaved."""

from __future__ import annotations

import errno
import io
import signal
import sys
from pathlib import Path

import pytest

import sage_grpo.telling.observers as samples_module
import trainer_toys
from sage_grpo.folder.journal import read_rows
from sage_grpo.session import run as train
from sage_grpo.telling.metrics import TensorBoard
from sage_grpo.training.config import KeepConfig, LogConfig


class Closing(io.StringIO):
    """An output that works for a while."""

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
    with pytest.warns(UserWarning, match="cannot be written any more .*: the run goes on without it"):
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
    assert "Stopped by signal after iteration 1; saved" in capsys.readouterr().out


def test_a_full_disk_for_videos_and_tensorboard(make_config, monkeypatch, tmp_path: Path) -> None:
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(samples_module, "write_mp4", full)
    monkeypatch.setattr(TensorBoard, "_put", full)
    config = make_config(iterations=1, keep=KeepConfig(videos_every=1), log=LogConfig(progress=False))
    with pytest.warns(UserWarning, match="The run goes on") as warned:
        train(config)
    said = "\n".join(str(warning.message) for warning in warned)
    for what in (f"Saving videos to {tmp_path}/run/videos", "Logging iteration 1 to TensorBoard"):
        assert f"{what} failed (OSError: [Errno 28] No space left on device). The run goes on." in said
    assert (Path(config.out) / "final").is_dir()
