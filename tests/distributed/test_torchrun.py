"""`torchrun -m sage_grpo`: starts, restarts from the last checkpoint, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dist_workers as workers
import processes
import pytest
import yaml
from safetensors.torch import load_file

from sage_grpo.distributed.checkpoint import newest_good
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.identity import plain
from sage_grpo.run.session import run as train
from trainer_helpers import same
from trainer_zoo.toy import Net

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_a_rank_that_dies_is_restarted_and_the_run_is_the_same(tmp_path) -> None:
    marker = tmp_path / "died"
    reward = RewardSpec(name="dist_workers:DiesOnce", options={"marker": str(marker)}, try_out=False)
    config = workers.configure(None, tmp_path, iterations=2, rewards=[reward])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval_prompts=None))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(plain(dataclasses.asdict(config))))
    command = launching(file, max_restarts=1)
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert marker.exists()
    assert "Resumed from" in done.stdout
    assert "at iteration 1" in done.stdout.replace("\n", " ")
    assert re.search(r"exitcode: -9\) local_rank: 1", done.stderr), done.stderr  # the agent's line
    assert not processes_of(tmp_path)

    whole = dataclasses.replace(config, out=str(tmp_path / "whole"))  # the marker is there now: nobody dies
    assert processes.run(workers.run_whole, 2, whole) == [None, None]
    expected, found = (load_file(Path(run.out) / "final" / "toy.safetensors") for run in (whole, config))
    assert same(found, expected)
    assert not same(found, Net().state_dict()), "it learned"


def test_ranks_end_with_a_launcher_that_was_killed(tmp_path) -> None:
    config = workers.configure(None, tmp_path, iterations=100_000)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval_prompts=None),
        keep=dataclasses.replace(config.keep, checkpoint_every=100_000),
    )
    file, metrics = tmp_path / "config.yaml", tmp_path / "run" / "metrics.jsonl"
    file.write_text(yaml.safe_dump(plain(dataclasses.asdict(config))))
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(launching(file), env=surroundings(), stdout=log, stderr=log)
    try:
        wait_for(lambda: launcher.poll() is not None or (metrics.is_file() and metrics.read_text().count("\n") >= 1))
        assert launcher.poll() is None, (tmp_path / "log").read_text()
        with pytest.raises(ValueError, match=r"in use by another run \(process \d+ on"):
            train(config)
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not processes_of(tmp_path))
    said = (tmp_path / "log").read_text()
    assert re.search(r"Stopped by signal after iteration \d+; saved", said), said
    assert newest_good(tmp_path / "run" / "checkpoints") is not None
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_rank_whose_work_is_done_does_not_take_the_interpreter_down() -> None:
    """Threads of libraries that still run then may abort it; what was promised for the end (atexit) is done, and what was printed arrives."""
    program = """
import atexit, os, runpy, sys
import sage_grpo.cli.main
class Bomb:
    def __del__(self, abort=os.abort):
        abort()
def main():
    sys.bomb = Bomb()
    atexit.register(print, "said at the end")
    print("done", end="")
    return 3
sage_grpo.cli.main.main = main
runpy.run_module("sage_grpo", run_name="__main__")
"""
    ended = {}
    for name, rank in (("one of several", {"RANK": "0"}), ("alone", {})):
        environment = {key: value for key, value in os.environ.items() if key != "RANK"} | rank
        ended[name] = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended["one of several"].returncode == 3, ended["one of several"].stderr
    assert ended["one of several"].stdout == "donesaid at the end\n"
    assert ended["alone"].returncode == -signal.SIGABRT, "the test would not notice a bomb"


def launching(file: Path, max_restarts: int = 0) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, "--max-restarts", str(max_restarts), "-m", "sage_grpo", "train", "--config", str(file)]


def surroundings() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def wait_for(condition) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def processes_of(folder: Path) -> list[str]:
    commands = [_command(entry) for entry in Path("/proc").glob("[0-9]*/cmdline")]
    return [command for command in commands if str(folder) in command and "sage_grpo" in command]


def _command(entry: Path) -> str:
    try:
        return entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended while we looked
        return ""
