"""Whole configurations by name: TARGET/METHOD, such as shapes/sage or hunyuan15/flow_grpo.

A target is a model with its data and rewards; a method is a few lines on top of any target. `hunyuan15/official` is the
released code's own run. Start from one with `sage-grpo train --recipe NAME` and override options;
`--print_config` shows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from sage_grpo.config.errors import recipe_hint
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS, WHOLE, using
from sage_grpo.training.config import TrainConfig
from sage_grpo.utils.suggest import did_you_mean

PINNED = ("guidance_scale", "guidance_scale_2", "frames", "height", "width", "fps", "shift")
"""Fields of a model that belong to one checkpoint."""
MOST_DIGITS = 5
"""A number of steps must have fewer digits: windows are lists of steps, which are made before any check."""


def names() -> list[str]:
    return [f"{target}/{method}" for target in TARGETS for method in METHODS] + list(WHOLE)


def meanings() -> dict[str, dict[str, str]]:
    """Meaning of every part of a recipe's name."""
    parts: dict[str, Mapping[str, Callable[..., TrainConfig]]] = {
        "recipes are TARGET/METHOD, with the targets (alone: with sage)": TARGETS | WHOLE,
        "and the methods (alone: on shapes)": METHODS,
    }
    return {
        heading: {name: (part.__doc__ or "").split("\n")[0] for name, part in named.items()}
        for heading, named in parts.items()
    }


def recipe(name: str, steps: int | str | None = None) -> TrainConfig:
    """The configuration of this name; a method alone is on the shapes world, a target alone with SAGE.

    `steps` is the run's own `rollout.steps`, if set: numbers of the method that are shares of the steps (windows, levels) follow it. An
    invalid text changes nothing, because the option parser refuses it.
    """
    base = name
    if name in METHODS:
        base = f"shapes/{name}"
    elif name in TARGETS:
        base = f"{name}/sage"
    if base not in names():
        raise ValueError(
            f"There is no recipe {name!r}. Targets: {', '.join(TARGETS)}; methods: {', '.join(METHODS)}; besides: "
            f"{', '.join(WHOLE)}." + (recipe_hint(name, TARGETS) or did_you_mean(name, [*TARGETS, *METHODS, *names()]))
        )
    target, _, method = base.partition("/")
    config, text = (WHOLE | TARGETS)[base if base in WHOLE else target](), str(steps)
    if base not in WHOLE:
        if text.isdecimal() and len(text) < MOST_DIGITS and int(text):
            config = using(config, {"rollout.steps": int(text)})
        config = METHODS[method](config)
    return replace(config, out=f"runs/{target}-{method}")


def remarks(config: TrainConfig, start: TrainConfig) -> Iterator[str]:
    """Remarks for a user with another checkpoint than the recipe's: settings of the recipe that remain."""
    if config.model.path == start.model.path:
        return
    stayed = {
        name: value
        for name in PINNED
        if (value := getattr(start.model, name)) is not None
        and getattr(config.model, name) == value
        # Guidance 1 is a choice of the method (nft, awm), for any checkpoint.
        and not (name == "guidance_scale" and value == 1)
    }
    if stayed:
        values = ", ".join(f"model.{name} {value:g}" for name, value in stayed.items())
        yield (
            f"model.path is {config.model.path}, but {values} are still the recipe's, chosen for {start.model.path}. Set "
            f"them, or give {' '.join(f'--model.{name} null' for name in stayed)} for the checkpoint's own."
        )
