"""Ranks end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHILD = """
import os, signal, sys, time
from pathlib import Path
from sage_grpo.parallel.heartbeat import end_with_parent

def save(number, frame):
    Path(sys.argv[1], "saved").touch()
    if sys.argv[2] == "good":
        os._exit(0)

signal.signal(signal.SIGTERM, save)
end_with_parent(grace=0.3)
Path(sys.argv[1], "pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); time.sleep(600)"


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("manners", ["good", "bad"])
def test_a_process_saves_and_ends_when_its_launcher_was_killed(manners: str, tmp_path: Path) -> None:
    """One that does not leave when asked to is ended."""
    launcher = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(tmp_path), manners])
    wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    try:
        assert is_alive(pid)
        assert not (tmp_path / "saved").exists()
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not is_alive(pid))
        assert (tmp_path / "saved").exists()
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
