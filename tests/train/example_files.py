"""examples/recipes/TARGET/METHOD.yaml: every recipe as `sage-grpo train --recipe NAME --print_config` prints it.

`python tests/train/example_files.py` writes them; tests/train/test_examples.py compares.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from sage_grpo import cli
from sage_grpo.recipes import names

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"


def printed(name: str) -> str:
    """What the command prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main(["train", "--recipe", name, "--print_config"])
    return f"# sage-grpo train --config examples/recipes/{name}.yaml\n{text.getvalue()}"


def files() -> dict[Path, str]:
    """Every file with its text."""
    return {FOLDER / f"{name}.yaml": printed(name) for name in names()}


def main() -> int:
    """Write what is missing or old, and delete what no recipe has."""
    wanted = files()
    for path in set(FOLDER.rglob("*.yaml")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
