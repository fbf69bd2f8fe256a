"""Every value of every preset is written down twice: a run that somebody made with one is made again by it, unless a release says otherwise.

After a change that is meant, `python tests/recipes/test_settings.py` (with tests/ and src/ on the path) writes settings.yaml anew; what changed in it belongs into the release notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_grpo.cli import train
from sage_grpo.cli.starting import from_recipe
from sage_grpo.config.parsing import parse
from sage_grpo.recipes import recipe, remarks
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS, WHOLE, using
from sage_grpo.run.identity import differences, plain
from sage_grpo.training.config import TrainConfig

FILE = Path(__file__).with_name("settings.yaml")
EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"


def changes(before: TrainConfig, after: TrainConfig) -> dict[str, Any]:
    found = differences(plain(asdict(before)), plain(asdict(after)))
    return {name: new for name, (_, new) in found.items()}


def at_steps(method: Callable[[TrainConfig], TrainConfig], target: str, steps: int) -> dict[str, Any]:
    """What a method changes of a target with so many steps: most of its numbers follow them."""
    base = TARGETS[target]()
    base = replace(base, rollout=replace(base.rollout, steps=steps))
    return changes(base, method(base))


def settings() -> dict[str, Any]:
    """Targets by what they change of the defaults; methods by what they change of a target, at several numbers of steps, of which two leave no room for shares."""
    targets = {name: changes(TrainConfig(), target()) for name, target in {**TARGETS, **WHOLE}.items()}
    methods = {
        f"{name} on {target} with {steps} steps": at_steps(method, target, steps)
        for name, method in METHODS.items()
        for target, steps in (("shapes", 6), ("shapes", 2), ("wan", 20))
    }
    return targets | methods


def test_presets_say_what_they_said() -> None:
    known, found = yaml.safe_load(FILE.read_text()), yaml.safe_load(yaml.safe_dump(settings()))
    assert known.keys() == found.keys()
    for name, values in found.items():
        assert values == known[name], f"{name}: see the end of this file"


@pytest.mark.parametrize("method", ["branch", "mix_grpo", "nft", "flow_grpo"])
def test_a_recipe_for_other_steps_has_the_methods_shares_of_them(method: str) -> None:
    found = recipe(f"shapes/{method}", "10")
    assert changes(
        using(TARGETS["shapes"](), {"rollout.steps": 10}), replace(found, out=TrainConfig().out)
    ) == at_steps(METHODS[method], "shapes", 10)


@pytest.mark.parametrize("target", ["shapes", "wan", "wan22_5b", "sd35", "flux", "qwen_image", "ltx2"])
def test_a_recipe_is_its_method_on_its_target_and_the_example_says_the_same(target: str) -> None:
    name = yaml.safe_load((EXAMPLES / f"{target}.yaml").read_text())["recipe"]
    start, argv = from_recipe(train.Options, ["--config", str(EXAMPLES / f"{target}.yaml")])
    assert parse(train.Options, argv, prog="train", defaults=start, recipes=True) == recipe(name)
    method = name.removeprefix(f"{target}/")
    assert recipe(name) == replace(METHODS[method](TARGETS[target]()), out=f"runs/{target}-{method}")
    assert recipe(target).out == f"runs/{target}-sage"
    assert recipe(f"{target}/flash_grpo", 6).rollout.window.at == [0, 1, 2]
    assert recipe(f"{target}/sage", 6) == using(recipe(f"{target}/sage"), {"rollout.steps": 6})
    assert recipe("branch", "six") == recipe("branch")


def test_a_misspelt_recipe_is_named() -> None:
    assert recipe("branch") == recipe("shapes/branch")
    with pytest.raises(ValueError, match="Did you mean 'shapes/sage'"):
        recipe("shapes/sagee")


def test_facts_of_the_recipes_checkpoint_that_stayed_with_another_are_told() -> None:
    start = recipe("wan22/sage")
    other = replace(start, model=replace(start.model, path="another", guidance_scale=7.0))
    assert list(remarks(start, start)) == []
    (told,) = remarks(other, start)
    assert "model.guidance_scale_2 3 are still" in told
    assert "guidance_scale 4" not in told
    assert "model.guidance_scale 4, model.guidance_scale_2 3 are still" in next(
        remarks(replace(start, model=replace(start.model, path="another")), start)
    )
    free = recipe("wan22/nft")  # no guidance is the method's choice
    assert list(remarks(replace(free, model=replace(free.model, path="another")), free)) == []


if __name__ == "__main__":
    lines = (f"{name}: {yaml.safe_dump(one, default_flow_style=True, width=10**6)}" for name, one in settings().items())
    FILE.write_text("".join(lines))
