"""Every benchmark can be started: what it imports of the package is there. Most of them need a GPU for anything more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
LOAD = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]"


def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    assert len(names) > 20
    done = subprocess.run([sys.executable, "-c", LOAD, *names], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
