"""Run the code cells of a notebook in this process, without Jupyter: `python tests/notebooks.py` writes what they say into the file."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, in the current folder; what a cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run_cell("".join(cell["source"]), names, number) for number, cell in enumerate(cells, 1)]


def _run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree, value, said = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": said.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": [f"<{type(value).__name__}>"]}
        if callable(getattr(value, "_repr_png_", None)):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        outputs.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
    return outputs


def write(file: Path) -> None:
    notebook, here = read(file), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outputs = run(notebook)
        os.chdir(here)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, output) in enumerate(zip(cells, outputs), 1):
        cell["execution_count"], cell["outputs"] = number, output
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for one in NOTEBOOKS if len(sys.argv) < 2 else map(Path, sys.argv[1:]):
        write(one.resolve())
