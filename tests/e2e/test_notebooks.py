"""The notebooks in examples/ run, and hold what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import notebooks

pytestmark = pytest.mark.slow


def shape(outputs: list[dict[str, Any]]) -> list[str]:
    """What was said, without numbers, which differ a little between machines; pictures by their kind."""
    return [
        re.sub(r"-?\d+(\.\d+)?", "#", "".join(output["text"])) if "text" in output else " ".join(sorted(output["data"]))
        for output in outputs
    ]


@pytest.mark.parametrize("file", notebooks.NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_runs_and_says_what_it_holds(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = notebooks.read(file)
    monkeypatch.chdir(tmp_path)
    said = notebooks.run(notebook)
    held = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert any(held), "run: python tests/notebooks.py"
    assert [shape(one) for one in said] == [shape(one) for one in held], "run: python tests/notebooks.py"
    assert file.stat().st_size < 100_000
