"""The benchmark of whole iterations runs from end to end on tiny networks, and has every phase beside what plan says."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_grpo.parallel.formulas import GIB

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


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    return importlib.import_module("whole_iteration")


@pytest.mark.parametrize(
    ("device", "options", "compiled"),
    [("cuda", "", True), ("cpu", "", False), ("cuda", "--model.compile false", False)],
)
def test_a_case_is_compiled_where_a_run_of_it_would_be(device: str, options: str, compiled: bool, benchmark) -> None:
    """A network as it comes is a fifth slower, and plan counts with the compiled one."""
    _, config = benchmark.configured(f"a: --recipe wan/branch {options}", small=False, device=device)
    assert config.model.compile is compiled


def test_a_case_that_runs_out_of_memory_is_told_and_the_next_one_runs(tmp_path, benchmark, monkeypatch) -> None:
    fates = iter([torch.OutOfMemoryError("Tried to allocate 522 MiB. GPU 0 is full."), {"time/total": 1.0}])

    def measured(*given):
        fate = next(fates)
        if isinstance(fate, Exception):
            raise fate
        return {**{f"time/{name}": 1.0 for name in ("rollout", "decode", "reward", "update")}, **fate}

    built = []
    monkeypatch.setattr(benchmark, "measured", measured)
    build = benchmark.build
    monkeypatch.setattr(benchmark, "build", lambda *given: built.append(1) or build(*given))
    case, out = f"wan: --recipe wan/branch {FEW} --rollout.window.at [1]", tmp_path / "found.jsonl"
    words = ["--small", "--device", "cpu", "--out", str(out), "--case", case, "--case", case]
    assert benchmark.main(words) == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["error"] == "Tried to allocate 522 MiB"
    assert first["phases"] == {}
    assert "error" not in second
    assert second["phases"]["iteration"]["seconds"][0] == 1.0
    assert len(built) == 2  # what was left of the first is not used again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole_iteration_h200", "whole_iteration_limits_h200"])
def test_what_was_measured_stands_beside_what_plan_says(name: str, benchmark) -> None:
    """Of the rows that docs/plan.md and docs/recipes.md show: the planned side is the program's, and whole iterations are near it."""
    file = BENCHMARK.parent / "results" / f"{name}.jsonl"
    for row in map(json.loads, file.read_text().splitlines()):
        _, config = benchmark.configured(f"{row['case']}: {row['options']}", small=False, device="cuda")
        found = benchmark.find(argparse.Namespace(small=False), config)
        said = benchmark.forecast(config, benchmark.hardware.find("h200"), architecture=found)
        for phase in said.phases:
            pairs = row["phases"][phase.name]
            assert [pairs["seconds"][1], pairs["gib"][1]] == pytest.approx([phase.seconds, phase.memory.total / GIB])
        for key, near in (("seconds", 0.2), ("gib", 0.1)):
            if key == "seconds" and row["limit_gib"] is not None:  # others were on the GPU
                continue
            measured, planned = row["phases"]["iteration"][key]
            assert planned == pytest.approx(measured, rel=near)
