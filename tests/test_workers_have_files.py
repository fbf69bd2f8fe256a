"""The test command gives whole files to its workers: fixtures of a file are made once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_tests_of_a_file_run_on_one_worker_and_both_workers_have_some() -> None:
    words = re.search(r"-m pytest -q (.*) \$\(PYTEST_OPTIONS\)", (ROOT / "Makefile").read_text())
    assert words is not None
    chosen = ["tests/test_house.py", "tests/rl/test_advantage.py", "tests/flow/test_schedule.py", "-k", "not picture"]
    command = [sys.executable, "-m", "pytest", "-v", *words[1].split(), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    found: dict[str, set[str]] = {}
    for worker, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, re.MULTILINE):
        found.setdefault(file, set()).add(worker)
    assert len(found) == 3
    assert all(len(workers) == 1 for workers in found.values()), found
    assert len(set.union(*found.values())) == 2, found
