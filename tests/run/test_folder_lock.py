"""A folder has one run at a time, whatever became of the one before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
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
HOLD += "FolderLock(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\ntime.sleep(600)\n"


BEATS = lock_module.PATIENCE / lock_module.BEAT


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT", 0.05)
    monkeypatch.setattr(lock_module, "PATIENCE", 0.6)


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
    with FolderLock(Path(config.out)), pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        train(config)


def foreign(out: Path) -> Path:
    """The lock file of a run on another machine, whose flock does not reach here."""
    out.mkdir()
    file = out / ".lock"
    file.write_text(json.dumps({"host": "node-7", "pid": 12, "since": "then", "place": "another/machine:12"}))
    return file


def test_a_live_run_on_another_machine_is_seen_by_its_beats(tmp_path: Path) -> None:
    file, done = foreign(tmp_path / "run"), threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderLocked, match="process 12 on node-7, since then"):
            FolderLock(tmp_path / "run").acquire()
    finally:
        done.set()
        thread.join()
    assert json.loads(file.read_text())["pid"] == 12


def test_a_dead_run_on_another_machine_is_replaced(tmp_path: Path) -> None:
    assert BEATS == 4  # a disk may lose one of them
    file = foreign(tmp_path / "run")
    with FolderLock(tmp_path / "run"):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_the_lock_of_a_file_that_was_removed_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner ends, and another run takes the folder, between our opening of its file and our lock on it."""
    first, other, flock = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run"), lock_module._flock
    first.acquire()

    def late(stream: IO[str]) -> bool | None:
        monkeypatch.setattr(lock_module, "_flock", flock)
        first.release()
        other.acquire()
        return flock(stream)

    monkeypatch.setattr(lock_module, "_flock", late)
    with pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path / "run").acquire()
    other.release()


def test_a_file_that_its_owner_removes_while_we_watch_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    """A run on another machine ends while we look for its beats: what we locked is gone, and the name is free for all."""
    file = foreign(tmp_path / "run")

    def ends(self: FolderLock, stream: IO[str]) -> bool:
        file.unlink()
        return False

    monkeypatch.setattr(FolderLock, "_touched", ends)
    mine = FolderLock(tmp_path / "run")
    mine.acquire()
    assert json.loads(file.read_text())["pid"] == os.getpid()
    with pytest.raises(FolderLocked):
        FolderLock(tmp_path / "run").acquire()


def test_another_runs_lock_is_neither_removed_nor_kept_alive(tmp_path: Path) -> None:
    """Somebody removes our file by hand, and another run makes its own."""
    mine = FolderLock(tmp_path / "run")
    mine.acquire()
    mine.file.unlink()
    theirs = FolderLock(tmp_path / "run")
    theirs.acquire()
    theirs._stop.set()  # no more beats of its own
    os.utime(theirs.file, (1.0, 1.0))
    time.sleep(4 * lock_module.BEAT)
    assert theirs.file.stat().st_mtime == 1.0
    mine.release()
    with pytest.raises(FolderLocked):
        FolderLock(tmp_path / "run").acquire()


def test_without_the_systems_locks_beats_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "fcntl", None)
    first = FolderLock(tmp_path / "run")
    first.acquire()
    with pytest.raises(FolderLocked):
        FolderLock(tmp_path / "run").acquire()
    first._stop.set()  # its process has died: no more beats
    time.sleep(2 * lock_module.BEAT)
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


def test_a_folder_that_cannot_be_written_is_refused_by_name(make_config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run's folder .*file/run cannot be written"):
        train(make_config(out=str(tmp_path / "file" / "run")))
