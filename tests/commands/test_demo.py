"""The demo says how long it takes before it begins, on the model of either world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.commands.demo import estimate
from sage_grpo.recipes import recipe


@pytest.mark.parametrize(("name", "kind"), [("shapes/sage", "hunyuan15_t2v"), ("scenes/branch", "wan21_t2v")])
def test_it_times_a_pass_of_any_model(name: str, kind: str, checkpoint: Callable[[str], Path]) -> None:
    """Wan's chooses its expert by the one noise level of a pass: a level for every clip, as others would take, stopped the demo."""
    config = recipe(name)
    model = replace(config.model, path=str(checkpoint(kind)), frames=5, height=32, width=32, fps=8.0)
    short, long = (estimate(replace(config, model=model, iterations=count)) for count in (1, 1000))
    assert 0 < short < long
