"""A new field is a line with its docstring in a dataclass, and a row of the wiring table: everything else follows from its type."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "src" / "sage_grpo"
BEFORE = "    trained_fraction: "
ADDED = '''    look_ahead: Speed[Count] = 3
    """Clips that are read ahead."""
    sharpness: Positive = 1.5
    """How sharply a group is cut."""
'''
ASKED = """
import dataclasses, json, sys
from pathlib import Path
from docs_options import section
from sage_grpo.commands import completion
from sage_grpo.configure import parse
from sage_grpo.folder import identity
from sage_grpo.lab.prepare import key_of
from sage_grpo.manual import manual
from sage_grpo.report.summary import _is_of_experiment
from sage_grpo.training.config import TrainConfig
from wiring import leaf_fields
from wiring_table import ROWS

def answer(*words):
    try:
        return parse(TrainConfig, words, prog="x")
    except ValueError as error:
        return str(error)

config = TrainConfig()
prints = dict.fromkeys(identity.CONTENT, "same")
meta = {"config": identity.plain(dataclasses.asdict(config)), "identity": prints}

def continued(*words):
    try:
        return identity.check(answer(*words), prints, meta, Path("run"))
    except ValueError as error:
        return str(error)

def told_apart(*words):
    return key_of(answer(*words), (), "train") != key_of(config, (), "train")

fast, other = ("--batch.look_ahead", "5"), ("--batch.sharpness", "2")
print(json.dumps({
    "help": manual(TrainConfig, "batch", prog="x", about=""),
    "table": section(),
    "completed": [word for word in completion.words()["train"] if word.startswith("--batch.")],
    "range": answer("--batch.sharpness", "-1"),
    "misspelt": answer("--batch.sharpnes", "2"),
    "continued": [continued(*fast), continued(*other)],
    "keys": [told_apart(*fast), told_apart(*other)],
    "experiment": [_is_of_experiment("batch.look_ahead"), _is_of_experiment("batch.sharpness")],
    "rows": sorted(set(leaf_fields(TrainConfig)) - set(ROWS)),
}))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package with two fields more; files that are not code are links."""

    def copy(source: str, target: str) -> None:
        shutil.copy(source, target) if source.endswith(".py") else os.symlink(source, target)

    shutil.copytree(PACKAGE, tmp_path / "sage_grpo", copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "sage_grpo" / "training" / "config.py"
    text = file.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    file.write_text(text.replace(BEFORE, ADDED + BEFORE), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_field_is_one_line_and_a_row(copied: Path) -> None:
    paths = os.pathsep.join(map(str, (copied, TESTS / "training", TESTS)))
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert "--batch.look_ahead INT (3)" in found["help"]
    assert "How sharply a group is cut. Must be positive." in found["help"]
    assert "| `batch.look_ahead` | `3` | at least 1 | Clips that are read ahead. |" in found["table"]
    assert {"--batch.look_ahead", "--batch.sharpness"} <= set(found["completed"])
    assert found["range"] == "batch.sharpness must be positive, got -1.0."
    assert "Did you mean 'batch.sharpness'?" in found["misspelt"]
    # Speed may change when a run is continued, and is told; what a run computes may not.
    free, refused = found["continued"]
    assert free == ["batch.look_ahead"]
    assert "batch.sharpness: 1.5 -> 2.0" in refused
    assert found["keys"] == [True, True]  # a comparison measures time as well
    assert found["experiment"] == [False, True]
    assert found["rows"] == ["batch.look_ahead", "batch.sharpness"]  # all that is left to write
