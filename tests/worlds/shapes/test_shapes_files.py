"""shapes/ is the world; making/shapes/ only made its checkpoint."""

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


def test_what_is_not_the_world_is_with_the_making() -> None:
    world = {path.stem for path in (PACKAGE / "worlds" / "shapes").glob("*.py")} - {"__init__"}
    assert world == {"scene", "render", "fit", "judge"}
    text = ast.get_docstring(ast.parse((PACKAGE / "worlds" / "shapes" / "__init__.py").read_text())) or ""
    assert all(name in text for name in world)  # a reader of the folder is told


def test_a_figure_does_not_know_the_command_that_draws_it() -> None:
    for path in (PACKAGE / "commands").glob("*_figure.py"):
        assert f"sage_grpo.commands.{path.stem.removesuffix('_figure')}" not in imported(path)
