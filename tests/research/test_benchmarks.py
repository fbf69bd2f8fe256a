"""Benchmarks can be started and say what is there: most of them need a GPU for anything more."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sage_grpo.parallel.formulas import GIB

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIDE_BY_SIDE = FOLDER / "side_by_side"


def test_benchmarks_find_what_they_import() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sage_grpo"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    there = hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}") is not None
                    assert there, f"{file.name} imports {name.name} from {node.module}, which does not have it"


@pytest.mark.parametrize("name", ["whole_iteration_h200", "whole_iteration_limits_h200"])
def test_what_was_measured_stands_beside_what_plan_says(name: str, benchmark_module) -> None:
    """Of the rows that docs/plan.md and docs/recipes.md show: the planned side is the program's, and whole iterations are near it."""
    benchmark = benchmark_module("whole_iteration")
    file = FOLDER / "results" / f"{name}.jsonl"
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


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The benchmark's files are scripts beside one another."""
    before = set(sys.modules)
    sys.path.insert(0, str(SIDE_BY_SIDE))
    yield
    sys.path.remove(str(SIDE_BY_SIDE))
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if Path(getattr(module, "__file__", None) or "").parent == SIDE_BY_SIDE:
            del sys.modules[name]


def test_all_variants_do_the_same_work(modules: None, tmp_path: Path) -> None:
    """Ours and stock diffusers on both models, in this process."""
    import job
    import run
    import unit
    from table import render

    arguments = ["--tiny", "--out", str(tmp_path / "out.jsonl"), "--level", "2", "--variants", "ours,stock"]
    arguments += ["--set", "optimizer.lr=3e-4", "--repeats", "2"]
    small = dataclasses.asdict(job.TINY.warmup())
    lines = run.measure(run.parse(arguments), tmp_path, lambda each, seconds: unit.run({**each, "job": small}))
    assert [(line["model"], line["variant"], line["status"]) for line in lines] == [
        ("wan", "ours", "ok"),
        ("hunyuan15", "ours", "ok"),
        ("wan", "stock", "ok"),
        ("hunyuan15", "stock", "ok"),
    ]
    for model in ("wan", "hunyuan15"):
        own = [line for line in lines if line["model"] == model]
        assert len({line["lora"]["parameters"] for line in own}) == 1
        assert all(line["passes"]["training_pass"]["seconds"] > 0 for line in own)
    (ours,) = (line for line in lines if "timed" in line)
    assert ours["timed"]["forwards"] == {"rollout": 12, "update": 4}
    assert ours["timed"]["first_log_ratio"] == 0.0
    assert all(line["replay_error"] == 0.0 for line in lines if line["variant"].startswith("ours"))
    assert ours["settings"] == {"optimizer.lr": 3e-4}
    assert ours["job_seconds"]["total"] == min(ours["totals"])
    text = render(lines)
    assert " of 2 |" in text
    assert "Same work: clips and steps [2, 3, 1]; forward passes of the rollout 12" in text
    assert "DIFFER" not in text
    other = {**ours, "variant": "peer", "lora": {"parameters": 1}}
    assert "LoRA parameters DIFFER" in render([*lines, other])


def test_documents_hold_the_tables_of_their_files(modules: None) -> None:
    from table import fill

    text = (FOLDER.parent / "docs" / "speed.md").read_text()
    assert text.count("<!-- table ") == text.count("<!-- end of table -->") > 0
    assert fill(text, FOLDER.parent) == text, "run `python benchmarks/side_by_side/table.py --into docs/speed.md`"
