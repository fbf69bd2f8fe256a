"""The rooms of the worlds do without what made their checkpoints."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "src" / "sage_grpo"


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_only_the_command_that_makes_it_needs_the_making() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "making" not in path.parts]
    users = [
        path.relative_to(PACKAGE).as_posix() for path in files if any("worlds.making" in n for n in imported(path))
    ]
    assert sorted(users) == ["commands/scenes.py", "commands/shapes.py", "commands/worlds.py"]
