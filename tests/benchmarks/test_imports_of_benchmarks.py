"""Every benchmark can be started: what it takes from the package is there. Most of them need a GPU for anything more."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


def test_there_are_benchmarks() -> None:
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(FOLDER).as_posix())
def test_a_benchmark_finds_what_it_imports(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sage_grpo"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                there = hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}") is not None
                assert there, f"{file.name} imports {name.name} from {node.module}, which does not have it"
