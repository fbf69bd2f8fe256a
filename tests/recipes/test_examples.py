"""Example configurations: a short one for every target, and each is its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sage_grpo.commands import train
from sage_grpo.configure import parse
from sage_grpo.recipes import recipe
from sage_grpo.recipes.targets import TARGETS

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"


def test_every_target_has_an_example() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_an_example_says_what_its_recipe_says(target: str) -> None:
    file = FOLDER / f"{target}.yaml"
    name = yaml.safe_load(file.read_text())["recipe"]
    start, argv = train.defaults(["--config", str(file)])
    assert parse(train.Options, argv, prog="train", defaults=start, recipes=True) == recipe(name)
    assert name.startswith(f"{target}/")
