"""Experiments by name. Each is a claim of the paper, or a question of ours, as data; the order is that of importance."""

from __future__ import annotations

from collections.abc import Callable

from sage_grpo.tools.compare.design import Suite
from sage_grpo.tools.compare.suites.after import after, after_long, going_back
from sage_grpo.tools.compare.suites.common import Size, expected_seconds
from sage_grpo.tools.compare.suites.few_steps import few_steps
from sage_grpo.tools.compare.suites.gradients import gradients
from sage_grpo.tools.compare.suites.headline import headline, tuning
from sage_grpo.tools.compare.suites.leash import (
    dose,
    hacking,
    heat,
    schedule,
    sentinel,
    strategy,
    strategy_updates,
    taken,
    witness,
)
from sage_grpo.tools.compare.suites.methods import distance, preferences, scaling, staleness, table2, table2_a
from sage_grpo.tools.compare.suites.samplers import equaliser, noise, regime
from sage_grpo.tools.compare.suites.second import (
    scenes_equaliser,
    scenes_hacking,
    scenes_headline,
    scenes_lora,
    scenes_prompts,
    scenes_rates,
    scenes_sentinel,
    scenes_size,
    scenes_tuning,
)

__all__ = ["SUITES", "Size", "expected_seconds"]

SUITES: dict[str, Callable[[Size], Suite]] = {
    suite.__name__: suite
    for suite in (
        *(strategy, table2, heat, noise, equaliser, hacking, schedule, scaling, table2_a, strategy_updates, sentinel),
        *(distance, headline, tuning, regime, dose, taken, witness, after, few_steps, preferences, gradients),
        *(staleness, after_long, going_back),
        *(
            scenes_headline,
            scenes_tuning,
            scenes_rates,
            scenes_hacking,
            scenes_sentinel,
            scenes_equaliser,
            scenes_prompts,
            scenes_lora,
            scenes_size,
        ),
    )
}
"""Name -> the suite of a size: smoke for two CPU cores, brief and full for minutes of a GPU."""
