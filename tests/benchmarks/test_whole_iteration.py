"""The benchmark of whole iterations runs from end to end on tiny networks, and has every phase beside what plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "whole_iteration.py"
FEW = "--model.frames 5 --rollout.steps 4 --batch.prompts 2 --batch.group_size 2 --batch.micro_batch 1"


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own."""
    return subprocess.run(
        [sys.executable, str(BENCHMARK), "--small", "--device", "cpu", *words],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_phase_of_every_case_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    branch = f"branch: --recipe wan/branch {FEW} --rollout.window.at [1]"
    done = ran("--out", str(out), "--case", branch, "--case", f"draft: --recipe wan/draft {FEW}")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, out.read_text().splitlines())
    assert list(first["phases"]) == ["rollout", "decode", "reward", "update", "iteration"]
    assert list(second["phases"]) == ["rollout", "decode", "reward", "gradient", "update", "iteration"]
    for row in (first, second):
        seconds = [found["seconds"][0] for found in row["phases"].values()]
        assert all(value > 0 for value in seconds)
        assert seconds[-1] >= 0.999 * sum(seconds[:-1])  # encoding the prompts is in the whole
        assert row["clips"] == 4
    assert first["first_log_ratio"] == 0
    assert "| draft | gradient |" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--case", "branch"], "--recipe"),
        (["--case", "a: --recipe wan/branch --rewards []"], "leave --rewards out"),
        (["--case", "a: --recipe wan/branch", "--limit", "24"], "--limit 24"),
        (
            ["--case", "a: --recipe wan/branch", "--case", "b: --recipe wan/branch --model.deterministic true"],
            "two calls",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_before_the_work(words: list[str], told: str) -> None:
    done = ran(*words)
    assert done.returncode != 0
    assert told in done.stderr
