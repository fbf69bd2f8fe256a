"""The methods as their authors run them, each at its own rate, compared at equal network passes, equal reward calls and equal iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.suites.common import COLUMNS, FLICKER, LONG_AS_FIRST, MEASURED, Size, judged, sized

ITERATIONS = 135
PASSES, CLIPS = 22_680, 6_480
"""What 135 iterations of branch cost: samples through the network, and clips that are scored (reward calls)."""
SEEDS = tuple(range(6001, 6009))
"""No run had these before."""
TUNING_SEEDS = (301, 302)
RATES = (2.5e-5, 5e-5, 1e-4)
CHOSEN: Mapping[str, float] = {
    "branch": 5e-5,
    "sage": 2.5e-5,
    "sage x 2": 2.5e-5,
    "mix": 2.5e-5,
    "flow": 2.5e-5,
    "dance": 2.5e-5,
    "cps": 2.5e-5,
    "nft": 2.5e-5,
    "awm": 1e-4,
}
"""The best rate of every method in `tuning`."""
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


def headline(size: Size) -> Suite:
    """Ten methods at their own rates, evaluated exactly at a budget of passes, at one of reward calls, and at their end."""
    first = {**LONG_AS_FIRST, "batch.micro_batch": 192}
    longer = Arm(name="branch_long", recipe="shapes/branch_long", options=first, iterations=400)
    suite = Suite(
        name="headline",
        title="Methods as their authors run them, at equal passes, equal reward calls and equal iterations",
        question="Which method learns most for the same network passes, which for the same number of scored clips, and which over the same iterations, "
        "when each has the learning rate that suits it best?",
        arms=(*(at_rate(arm, CHOSEN[arm.name], named=False) for arm in METHODS), longer),
        baseline="branch",
        seeds=SEEDS,
        options={**EVALUATION, "rewards": judged()},
        iterations=ITERATIONS,
        points=(0,),
        passes=PASSES,
        clips=CLIPS,
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="Rates were chosen with other seeds (suite `tuning`). `branch_long` is its recipe as it was then: four times the prompts, 400 iterations, a rate "
        "that falls to zero, so that at the budgets it has hardly begun. `sage` runs without its KL, which is inert at the printed coefficient and "
        "would cost a pass.",
    )
    return sized(suite, size, brief=[arm.name for arm in suite.arms if arm is not longer], smoke=("branch", "sage"))


def tuning(size: Size) -> Suite:
    """Three learning rates for every method of `headline`, on other seeds."""
    suite = Suite(
        name="tuning",
        title="The rate of every method",
        question="Which of three learning rates does each method learn most with in 135 iterations? The best one is its rate in `headline`.",
        # Below the lowest rate where the slope asked for it.
        arms=tuple(
            at_rate(arm, rate) for arm in METHODS for rate in (*((1.25e-5,) if arm.name == "sage x 2" else ()), *RATES)
        ),
        baseline=at_rate(METHODS[0], 5e-5).name,
        seeds=TUNING_SEEDS,
        options={**MEASURED, "rewards": judged()},
        iterations=ITERATIONS,
        points=(0,),
        columns=tuple(column for column in COLUMNS if column is not FLICKER),
        notes="Seeds below 1000 are for choosing; none of them is reported elsewhere.",
    )
    smoke = (at_rate(METHODS[0], 5e-5).name, at_rate(METHODS[1], 5e-5).name)
    quick = [arm.name for arm in suite.arms if arm.recipe not in ("shapes/nft", "shapes/awm")]
    return sized(suite, size, brief=quick, smoke=smoke)


def at_rate(arm: Arm, rate: float, *, named: bool = True) -> Arm:
    """The arm at this learning rate, which its name tells where it is `named`."""
    name = f"{arm.name} {rate:g}" if named else arm.name
    return replace(arm, name=name, options={**arm.options, "optimizer.lr": rate})
