"""A folder has one run at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.run import lock as lock_module
from sage_grpo.run.lock import FolderLocked, locked, owned
from sage_grpo.run.session import run as train

HOLD = "import sys, time\nfrom pathlib import Path\nfrom sage_grpo.run.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"


@pytest.mark.slow
def test_the_owner_is_named_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    said = rf"in use by another run \(process {owner.pid} on {socket.gethostname()}, since 20"
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=said), locked(tmp_path):
            pass
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]  # nothing of ours is there
    finally:
        owner.kill()
        owner.wait()
    with locked(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_two_runs_in_one_process_do_not_share_a_folder(make_config) -> None:
    config = make_config(iterations=1)
    with locked(Path(config.out)), pytest.raises(FolderLocked, match=f"process {os.getpid()}"):
        train(config)
    assert not Path(config.out).exists()


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
    monkeypatch.setattr(lock_module.json, "dumps", lambda *given: os.rmdir(tmp_path))  # an OSError, as of a full disk
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
