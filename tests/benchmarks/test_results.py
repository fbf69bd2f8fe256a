"""docs/results: the command that a page names makes the very runs that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from sage_grpo.lab import store
from sage_grpo.lab.prepare import prepare
from sage_grpo.lab.suites import SUITES
from sage_grpo.lab.suites.common import Size
from sage_grpo.recipes import recipe

RESULTS = Path(__file__).parents[2] / "docs" / "results"
OLDER = {"methods", "fresh", "sentinel"}
"""Runs of `benchmarks/methods.py`, of a grid without a suite, and of a suite that has other arms since; their pages say so."""
FOLDERS = sorted(file.parent for file in RESULTS.glob(f"*/{store.SUITE}") if file.parent.name not in OLDER)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_command_of_a_page_makes_its_runs(folder: Path, benchmark_module, monkeypatch) -> None:
    _, _, command = store.load_suite(folder)
    monkeypatch.setitem(SUITES, "long_runs", benchmark_module("long_runs").long_runs)
    found = re.search(r"--suite (\S+)(?: --size (\S+))?", command)
    assert found, command
    name, size = found.groups()
    assert name == folder.name
    assert size is None or size in get_args(Size)
    jobs = {(job.arm, job.seed): job.key for job in prepare(SUITES[name](size or "full"), recipe)}
    rows = {(row["arm"], row["seed"]): row["key"] for row in store.read_rows(folder / store.ROWS)}
    assert rows
    assert rows.items() <= jobs.items()
