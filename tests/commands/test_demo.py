"""The demo says how long it takes before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sage_grpo.commands.demo import estimate
from sage_grpo.recipes import recipe


def test_it_times_a_pass_of_any_model(checkpoint: Callable[[str], Path]) -> None:
    """Wan's chooses its expert by the one noise level of a pass: a level for every clip, as others would take, stopped the demo."""
    config = recipe("scenes/branch")
    model = replace(config.model, path=str(checkpoint("wan_t2v")), frames=5, height=32, width=32, fps=8.0)
    short, long = (estimate(replace(config, model=model, iterations=count)) for count in (1, 1000))
    assert 0 < short < long
