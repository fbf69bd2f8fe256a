"""Example configurations: one for every recipe, and each is that recipe."""

from __future__ import annotations

import dataclasses
import json

import example_files
import pytest
import yaml

from sage_grpo.commands import train
from sage_grpo.configure import parse
from sage_grpo.recipes import names, recipe

AGAIN = "run: python tests/train/example_files.py"


def test_every_recipe_has_an_example_and_every_example_a_recipe() -> None:
    found = {
        path.relative_to(example_files.FOLDER).with_suffix("").as_posix() for path in example_files.FOLDER.rglob("*.*")
    }
    assert found == set(names()), AGAIN


def test_examples_hold_the_values_of_the_code() -> None:
    for name in names():
        content = yaml.load((example_files.FOLDER / f"{name}.yaml").read_text(), Loader=yaml.CSafeLoader)
        plain = json.loads(
            json.dumps(dataclasses.asdict(recipe(name)), default=str)
        )  # as YAML holds it: no tuples, no paths
        assert content == {"recipe": name, **plain}, f"{name}: {AGAIN}"


def test_an_example_is_what_the_command_prints() -> None:
    assert (example_files.FOLDER / "wan/branch.yaml").read_text() == example_files.printed("wan/branch"), AGAIN


@pytest.mark.parametrize("name", ["shapes/sage", "hunyuan15/official"])
def test_an_example_is_read_back_as_the_recipe(name: str) -> None:
    start, argv = train.defaults(["--config", str(example_files.FOLDER / f"{name}.yaml")])
    assert parse(train.Options, argv, prog="train", defaults=start, recipes=True) == recipe(name)
