"""A run outlives its surroundings: it goes on, or saves and leaves. It never dies unsaved."""

from __future__ import annotations

import errno
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.ENOSPC, "No space left"),
        ValueError("I/O on closed file"),
    ],
    ids=["closed pipe", "full disk", "closed file"],
)
def test_output_that_cannot_be_written(error: Exception, after: int, make_config, monkeypatch) -> None:
    config = make_config(iterations=2)
    monkeypatch.setattr(sys, "stdout", Closing(error, after))
    with pytest.warns(UserWarning, match="cannot be written any more .*: the run goes on without it"):
        train(config)
    assert [row["iteration"] for row in read_rows(Path(config.out) / "metrics.jsonl")] == [0, 1, 2, 2]
    assert (Path(config.out) / "final").is_dir()


def hang_up(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The terminal goes away during reward call number `at` (the first is the reward's try-out)."""
    bright, calls = trainer_toys.bright, []

    def bright_but_hung_up(videos, prompts, fps):
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGHUP)  # in this thread: its handler has run when this returns
        return bright(videos, prompts, fps)

    bright_but_hung_up.__name__ = "bright"
    monkeypatch.setattr(trainer_toys, "bright", bright_but_hung_up)


@contextmanager
def at_a_hang_up(action: signal.Handlers) -> Iterator[None]:
    """What the process does at SIGHUP when the run begins; tests that were started with nohup ignore it themselves."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
        assert signal.getsignal(signal.SIGHUP) is action
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_saves_and_leaves(make_config, monkeypatch, capsys) -> None:
    config = make_config(iterations=4, keep=KeepConfig(checkpoint_every=100, videos_every=0))
    hang_up(monkeypatch, at=3)
    with at_a_hang_up(signal.SIG_DFL):
        train(config)
    assert [folder.name for folder in (Path(config.out) / "checkpoints").iterdir()] == ["000001"]
    assert "Stopped by signal after iteration 1; saved" in capsys.readouterr().out


def test_a_full_disk_for_videos_and_tensorboard(make_config, monkeypatch, tmp_path: Path) -> None:
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(samples_module, "write_mp4", full)
    monkeypatch.setattr(TensorBoard, "_name", lambda self: "../../full")
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr("pathlib.Path.open", _appending(Path.open))
    config = make_config(
        iterations=2, keep=KeepConfig(checkpoint_every=1, videos_every=1), log=LogConfig(progress=False)
    )
    with pytest.warns(UserWarning, match="The run goes on") as warned:
        train(config)
    said = "\n".join(str(warning.message) for warning in warned)
    assert (
        f"Saving videos to {tmp_path}/run/videos failed (OSError: [Errno 28] No space left on device). The run goes on."
        in said
    )
    assert (
        "Logging iteration 1 to TensorBoard failed (OSError: [Errno 28] No space left on device). The run goes on."
        in said
    )
    assert (Path(config.out) / "final").is_dir()


def _appending(open_):
    """/dev/full exists already: open it for the writer, which makes its files anew."""

    def opening(self, mode="r", *arguments, **named):
        return open_(self, "wb" if mode == "xb" else mode, *arguments, **named)

    return opening
