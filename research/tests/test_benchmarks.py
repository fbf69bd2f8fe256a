"""Benchmarks can be started and say what is there: most of them need a GPU for anything more."""

from __future__ import annotations

import ast
import importlib
import json
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sage_grpo.config.parsing import given, parse
from sage_grpo.plan import hardware
from sage_grpo.plan.costs import forecast
from sage_grpo.plan.formulas import GIB
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import TrainConfig

FOLDER = Path(__file__).parents[1] / "benchmarks"
ROOT = Path(__file__).parents[2]


def test_benchmarks_find_what_they_import() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sage_grpo"):
                module = importlib.import_module(str(node.module))
                for name in (one.name for one in node.names):
                    assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), f"{file.name}: {name}"


@pytest.mark.parametrize("name", ["whole_iteration_h200", "whole_iteration_limits_h200"])
def test_what_was_measured_stands_beside_what_plan_says(name: str) -> None:
    """Of the rows that docs/speed.md shows: the planned side is the program's, and whole iterations are near it."""
    h200, bright = hardware.find("h200"), RewardSpec(name="video_stats", weights={"brightness": 1.0})
    file = FOLDER / "results" / f"{name}.jsonl"
    for row in map(json.loads, file.read_text().splitlines()):
        if "rollout.cheap" in row["options"]:  # of an earlier version
            continue
        words = shlex.split(row["options"])
        start = recipe(str(given(words, "recipe")))
        config = parse(TrainConfig, words, prog="test", defaults=start, recipes=True)
        said = forecast(replace(config, rewards=[bright]), h200)
        for phase in said.phases:
            pairs = row["phases"][phase.name]
            assert [pairs["seconds"][1], pairs["gib"][1]] == pytest.approx([phase.seconds, phase.memory.total / GIB])
        for key, near in (("seconds", 0.2), ("gib", 0.1)):
            if key == "seconds" and row["limit_gib"] is not None:  # others were on the GPU
                continue
            measured, planned = row["phases"]["iteration"][key]
            assert planned == pytest.approx(measured, rel=near)


def test_documents_hold_the_tables_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER / "side_by_side")  # scripts beside one another
    fill = importlib.import_module("table").fill
    text = (ROOT / "docs" / "speed.md").read_text()
    assert text.count("<!-- table ") == text.count("<!-- end of table -->") > 0
    assert fill(text, ROOT) == text, "run `python research/benchmarks/side_by_side/table.py --into docs/speed.md`"
