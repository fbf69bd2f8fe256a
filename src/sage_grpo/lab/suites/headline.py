"""The methods as their authors run them, each at its own rate, compared at equal network passes, equal reward calls and equal iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sage_grpo.lab.design import Arm, Suite
from sage_grpo.lab.suites.common import COLUMNS, FLICKER, MEASURED, Size, judged, sized

ITERATIONS = 135
PASSES, CLIPS = 22_680, 6_480
"""What 135 iterations of branch cost: samples through the network, and clips that are scored (reward calls)."""
SEEDS = tuple(range(6001, 6009))
"""No run had these before."""
TUNING_SEEDS = (301, 302)
RATES = (2.5e-5, 5e-5, 1e-4)
EVALUATION: Mapping[str, Any] = {"evaluate.prompts": 256, "evaluate.per_prompt": 2, "evaluate.steps": 20}
"""512 held-out clips, two of each prompt."""
ALL_STEPS: Mapping[str, Any] = {"update.step_fraction": 1.0, "trust_region.mode": "none"}
"""sage's KL is left out: at its printed coefficient it is inert in our normalisation, and its pass would count against it."""
METHODS = (
    Arm(name="branch", recipe="shapes/branch"),
    Arm(name="sage", recipe="shapes/sage_paper", options={**ALL_STEPS, "update.updates_per_rollout": 1}),
    Arm(name="sage x 2", recipe="shapes/sage_paper", options={**ALL_STEPS, "update.updates_per_rollout": 2}),
    Arm(name="mix", recipe="shapes/mix_grpo"),
    Arm(name="flow", recipe="shapes/flow_grpo"),
    Arm(name="dance", recipe="shapes/dance_grpo"),
    Arm(name="cps", recipe="shapes/cps"),
    Arm(name="nft", recipe="shapes/nft"),
    Arm(name="awm", recipe="shapes/awm"),
)
"""One update and all steps is how sage is released; the paper does not say how often a rollout is used."""


def tuning(size: Size) -> Suite:
    """Three learning rates for every method of `headline`, on other seeds."""
    suite = Suite(
        name="tuning",
        title="The rate of every method",
        question="Which of three learning rates does each method learn most with in 135 iterations? The best one is its rate in `headline`.",
        arms=tuple(_at(arm, rate) for arm in METHODS for rate in RATES),
        baseline=_at(METHODS[0], 5e-5).name,
        seeds=TUNING_SEEDS,
        options={**MEASURED, "rewards": judged()},
        iterations=ITERATIONS,
        points=(0,),
        columns=tuple(column for column in COLUMNS if column is not FLICKER),
        notes="Seeds below 1000 are for choosing; none of them is reported elsewhere.",
    )
    smoke = (_at(METHODS[0], 5e-5).name, _at(METHODS[1], 5e-5).name)
    return sized(suite, size, brief=[arm.name for arm in suite.arms], smoke=smoke)


def _at(arm: Arm, rate: float) -> Arm:
    return replace(arm, name=f"{arm.name} {rate:g}", options={**arm.options, "optimizer.lr": rate})
