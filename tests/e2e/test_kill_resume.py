"""Real processes, real signals: a killed run ends as the same run to the bit. benchmarks/kill_resume.py does more of it."""

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


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Callable[[str], Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    kill_resume.finish(arguments(checkpoint, prompts, out), out.parent / "log")
    return out


def arguments(checkpoint: Callable[[str], Path], prompts: Path, out: Path) -> list[str]:
    return kill_resume.arguments(str(checkpoint("hunyuan15_t2v")), prompts, out, iterations=10)


def test_killed_at_random_and_while_writing_a_checkpoint(
    checkpoint: Callable[[str], Path], prompts: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    argv, draw = arguments(checkpoint, prompts, out), random.Random()  # other moments every time: that is the test
    first = kill_resume.kill(argv, out, log, after=0.0, in_write=True)
    assert first is not None
    assert first.writing
    assert first.saved in (-1, 2)  # -1: it did not get to the rename
    for _ in range(2):
        kill_resume.kill(argv, out, log, after=draw.uniform(0.0, 3.0), in_write=False)
    kill_resume.finish(argv, log)
    assert kill_resume.differences(undisturbed, out) == []


def test_sigterm_saves_and_exits_with_0_and_the_same_command_continues(
    checkpoint: Callable[[str], Path], prompts: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    argv = arguments(checkpoint, prompts, out)
    process = kill_resume.start(argv, log)
    metrics = out / "metrics.jsonl"
    while process.is_alive() and (not metrics.is_file() or metrics.read_text().count("reward/total") < 1):
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    assert 1 <= kill_resume.newest(out) < 10
    assert not (out / "final").exists()
    assert "The same command continues from here" in " ".join(log.read_text().split())
    kill_resume.finish(argv, log)
    assert kill_resume.differences(undisturbed, out) == []


def without_a_reader(argv: list[str], where: str) -> None:
    """`sage-grpo ARGV` with its output into a pipe that nobody reads, or onto a full disk."""
    torch.set_num_threads(1)
    if where == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from sage_grpo.cli import main

    status = main(argv)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # as Python does at its end, where a failure would make the status 120
    sys.exit(status)


@pytest.mark.parametrize("where", ["pipe", "full"])
def test_a_run_outlives_its_output(
    where: str, checkpoint: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    argv = kill_resume.arguments(str(checkpoint("hunyuan15_t2v")), prompts, out, iterations=2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(kill_resume.PRELOAD)
    process = context.Process(target=without_a_reader, args=(argv, where))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert kill_resume.newest(out) == 2
    assert (out / "final").is_dir()


def test_the_comparison_sees_a_difference(undisturbed: Path, tmp_path: Path) -> None:
    """A benchmark that cannot fail proves nothing."""
    import shutil

    other = tmp_path / "other"
    shutil.copytree(undisturbed, other)
    assert kill_resume.differences(undisturbed, other) == []
    rows = (other / "metrics.jsonl").read_text().replace('"reward/failed": 0.0', '"reward/failed": 1.0', 1)
    (other / "metrics.jsonl").write_text(rows)
    from safetensors.torch import load_file, save_file

    (weights,) = (other / "final" / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1e-6
    weights.unlink()
    save_file(tensors, str(weights))
    assert kill_resume.differences(undisturbed, other) == ["metrics.jsonl", str(weights.relative_to(other))]
