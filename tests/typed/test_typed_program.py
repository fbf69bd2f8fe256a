"""The types that are shipped (py.typed), as a program sees them that is checked with mypy."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import user_script

import sage_grpo
from sage_grpo.api import EvaluateSettings, GenerateSettings
from sage_grpo.cli.evaluate import Options as EvaluateOptions
from sage_grpo.cli.generate import Options as GenerateOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_package_and_typed_program_have_no_error_and_mistakes_are_errors() -> None:
    """The call of `make types`, so that what that has found out is not found out again."""
    mypy = subprocess.run([sys.executable, "-m", "mypy", "--no-pretty"], cwd=ROOT, capture_output=True, text=True)
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr


def test_the_typed_program_names_all_that_is_public() -> None:
    nodes = list(ast.walk(ast.parse(Path(user_script.__file__).read_text())))
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "sage_grpo"
        for alias in node.names
    }
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sage"
    }
    assert set(sage_grpo.__all__) <= imported | read


def test_the_typed_program_runs(tmp_path: Path) -> None:
    told, result, clips = user_script.main(tmp_path / "run")
    assert told.events == [
        "evaluation 0, the best",
        "iteration 1 of 4 clips",
        told.events[2],  # which of the two evaluations is better is nobody's promise
        "checkpoint 000001",
    ]
    assert told.events[2].startswith("evaluation 1")
    assert (result.iteration, result.stopped) == (1, False)
    iteration, evaluation = told.rows
    assert {"reward/bright", "reward/smooth", "reward/total"} <= iteration.keys()
    assert "eval/smooth" in evaluation
    assert (clips.videos.shape, clips.seeds) == ((3, 2, 4, 4, 3), [5, 6, 7])
    assert torch.isfinite(user_script.explore()).all()


def test_typed_options_are_those_that_exist() -> None:
    """mypy holds their types to those of the dataclasses that they are handed to."""

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert set(EvaluateSettings.__annotations__) < names(EvaluateOptions)
    not_options = {"run", "model", "prompts", "out", "first", "rewards"}
    assert set(GenerateSettings.__annotations__) == names(GenerateOptions) - not_options
