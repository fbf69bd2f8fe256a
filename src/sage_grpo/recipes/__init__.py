"""Whole configurations by name: TARGET/METHOD, such as shapes/sage or hunyuan15/flow_grpo.

A target says what is trained and on what; a method is a few lines on top of any target. Start from one with
`sage-grpo train --recipe NAME` and override what you like; `--print_config` shows the result.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.train.config import TrainConfig


def names() -> list[str]:
    """Every recipe."""
    return [f"{target}/{method}" for target in TARGETS for method in METHODS]


def recipe(name: str) -> TrainConfig:
    """The configuration of this name; a method alone is meant on the shapes world, a target alone with SAGE."""
    if name in METHODS:
        name = f"shapes/{name}"
    elif name in TARGETS:
        name = f"{name}/sage"
    target, _, method = name.partition("/")
    build: Callable[[], TrainConfig] | None = TARGETS.get(target)
    change = METHODS.get(method)
    if build is None or change is None:
        known = [*TARGETS, *METHODS, *names()]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"There is no recipe {name!r}. Targets: {', '.join(TARGETS)}; methods: {', '.join(METHODS)}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    config = change(build())
    return replace(config, out=f"runs/{target}-{method}")
