"""A folder has one run at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO

import pytest

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.run import lock as lock_module
from sage_grpo.run.lock import FolderLock, FolderLocked, owned
from sage_grpo.run.session import run as train

HOLD = "import sys, time\nfrom pathlib import Path\nfrom sage_grpo.run.lock import FolderLock\n"
HOLD += "lock = FolderLock(Path(sys.argv[1]))\nlock.acquire()\nprint('held', flush=True)\ntime.sleep(600)\n"


@pytest.mark.slow
def test_the_owner_is_named_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    said = rf"in use by another run \(process {owner.pid} on {socket.gethostname()}, since 20"
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=said):
            FolderLock(tmp_path).acquire()
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]  # nothing of ours is there
    finally:
        owner.kill()
        owner.wait()
    with FolderLock(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_two_runs_in_one_process_do_not_share_a_folder(make_config) -> None:
    config = make_config(iterations=1)
    with FolderLock(Path(config.out)) as lock, pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        train(config)
    lock.acquire()
    stream = lock._stream
    lock.release()
    assert stream.closed, "the kernel's lock ends with it"


def test_the_lock_of_a_file_that_was_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner ends, and another run takes the folder, between our opening of its file and our lock on it."""
    first, other, lock = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run"), FolderLock._lock
    first.acquire()

    def late(self: FolderLock, stream: IO[str]) -> None:
        monkeypatch.setattr(FolderLock, "_lock", lock)
        first.release()
        other.acquire()
        lock(self, stream)

    monkeypatch.setattr(FolderLock, "_lock", late)
    with pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path / "run").acquire()
    other.release()


def test_another_runs_lock_is_not_removed(tmp_path: Path) -> None:
    """Somebody removes our file by hand, and another run makes its own."""
    ours, theirs = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run")
    ours.acquire()
    ours.file.unlink()
    ours.file.write_text("{}")  # of a run that was killed
    theirs.acquire()
    ours.release()
    stream = theirs.file.open("a+")
    with pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path / "run")._lock(stream)
    assert stream.closed


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "fcntl", None)
    with pytest.warns(UserWarning, match=r"run cannot be locked .*no other run works there"):
        FolderLock(tmp_path / "run").acquire()


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["slurm-12.out", "train.log", ".gitignore", "logs"], ""),
        (["notes.txt", "metrics.jsonl"], ""),
        (["holiday.jpg"], "holiday.jpg. Choose"),
        (["config.yaml", "a", "b", "c", "d"], "a, b, c and 1 more. Choose"),
    ],
)
def test_a_folder_of_other_files_is_refused_and_one_of_a_run_is_not(names, refused, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext(), owned(tmp_path, World()):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_a_folder_that_cannot_be_written_is_refused_by_name(make_config, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run's folder .*file/run cannot be written"):
        train(make_config(out=str(tmp_path / "file" / "run")))
    monkeypatch.setattr(lock_module.json, "dump", lambda *given: os.rmdir(tmp_path))  # an OSError, as of a full disk
    with pytest.raises(ConfigError, match="cannot be written"):
        FolderLock(tmp_path / "run").acquire()
    assert not (tmp_path / "run").exists()
