"""Real processes, real signals: a killed run ends as the same run to the bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kill_resume
import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a cat\na red dog\na bird\n")
    return file


def test_killed_at_random_and_while_writing_a_checkpoint_and_asked_to_stop(
    checkpoint: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    undisturbed, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    model = str(checkpoint("hunyuan15_t2v"))
    kill_resume.finish(kill_resume.arguments(model, prompts, undisturbed, iterations=8), tmp_path / "log of the whole")
    argv = kill_resume.arguments(model, prompts, out, iterations=8)
    first = kill_resume.kill(argv, out, log, after=0.0, in_write=True)
    assert first is not None
    assert first.writing
    assert first.saved in (-1, 2)  # -1: it did not get to the rename
    # Other moments every time: that is the test.
    kill_resume.kill(argv, out, log, after=random.Random().uniform(0.0, 3.0), in_write=False, not_beyond=4)

    process, metrics = kill_resume.start(argv, log), out / "metrics.jsonl"
    before = metrics.read_text().count("reward/total") if metrics.is_file() else 0
    while process.is_alive() and (not metrics.is_file() or metrics.read_text().count("reward/total") <= before):
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    assert 1 <= kill_resume.newest(out) < 8
    assert not (out / "final").exists()
    assert "The same command continues from here" in " ".join(log.read_text().split())
    kill_resume.finish(argv, log)
    assert kill_resume.differences(undisturbed, out) == []


def without_a_reader(argv: list[str]) -> None:
    """`sage-grpo ARGV` with its output into a pipe that nobody reads, and its errors onto a full disk."""
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from sage_grpo.cli.main import main

    status = main(argv)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # as Python does at its end, where a failure would make the status 120
    sys.exit(status)


def test_a_run_outlives_its_output(checkpoint: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = kill_resume.arguments(str(checkpoint("hunyuan15_t2v")), prompts, out, iterations=2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(kill_resume.PRELOAD)
    process = context.Process(target=without_a_reader, args=(argv,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert kill_resume.newest(out) == 2
    assert (out / "final").is_dir()
