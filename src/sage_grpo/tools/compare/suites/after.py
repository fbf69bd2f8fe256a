"""How few steps around the branch are enough: branch and branch_long with other solvers and numbers of steps that do not explore."""

from __future__ import annotations

from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.suites.common import COLUMNS, LONG_AS_FIRST, Size, judged, sized
from sage_grpo.tools.compare.suites.headline import EVALUATION, ITERATIONS

SEEDS = tuple(range(8001, 8009))
"""No run had these before."""
WAYS = (
    *((after, solver, 2) for after in (3, 2, 1) for solver in ("euler", "ab2")),
    *((after, "ab2", 1) for after in (3, 2)),
)
"""Steps after the branch, solver, steps before it. The first is what `branch` has, and what `branch_long` had."""
LONG = (
    ((3, "euler", 2), 400, 7e-5),
    ((2, "ab2", 2), 400, 7e-5),
    ((2, "ab2", 2), 360, 7e-5),
    ((2, "ab2", 2), 360, 8e-5),
    ((1, "ab2", 2), 400, 7e-5),
)
"""Ways in long runs, with their iterations and their first rate. The first is what the recipe had; two steps instead of three
in a tenth fewer iterations are 36% fewer passes."""


def after(size: Size) -> Suite:
    """Steps after the branch and before it, and their solver, in short runs and in long ones."""
    arms = [
        Arm(name=f"branch, {_told(*way)}", recipe="shapes/branch", options=_options(*way), iterations=ITERATIONS)
        for way in WAYS
    ]
    short = [arm.name for arm in arms]
    for way, iterations, rate in LONG:
        name = f"branch_long, {_told(*way)}" + ("" if iterations == LONG[0][1] else f", {iterations} at {rate:g}")
        options = {**LONG_AS_FIRST, **_options(*way), "optimizer.lr": rate, "batch.micro_batch": 192}
        arms.append(Arm(name=name, recipe="shapes/branch_long", options=options, iterations=iterations))
    suite = Suite(
        name="after",
        title="How few steps around the branch are enough",
        question="Steps that do not explore only lead to the branch, or make the clip that is scored. How few of them, with which solver, teach as much as "
        "the recipe's two before and three Euler steps after it?",
        arms=tuple(arms),
        baseline=arms[0].name,
        seeds=SEEDS,
        options={**EVALUATION, "rewards": judged()},
        iterations=ITERATIONS,
        points=(0,),
        columns=COLUMNS,
        figures=("bars",),
        notes="Seeds that nothing was chosen with, and the evaluation of `headline`: 512 clips, 20 steps. `sage-grpo probe --probe.ways.measure true` says of "
        "the same ways how alike they rank the clips of a group (docs/probe.md).",
    )
    return sized(suite, size, brief=short, smoke=(short[0], short[3]))


def after_long(size: Size) -> Suite:
    """Long runs with two second-order steps after the branch, which also explore later steps, against three Euler steps."""
    cheaper = {**_options(2, "ab2", 2), "batch.prompts": 24}
    later = {"rollout.window.at": [2, 3, 4], "rollout.window.weights": [3, 1, 1]}
    ways: dict[str, tuple[int, dict[str, object]]] = {
        "16 prompts, 3 euler": (400, _options(3, "euler", 2)),
        "24 prompts, 2 ab2": (240, {**cheaper, "optimizer.lr": 1.2e-4}),
        "24 prompts, 2 ab2, steps 2 to 4": (236, {**cheaper, "optimizer.lr": 1e-4, **later}),  # the recipe since
    }
    arms = tuple(
        Arm(
            name=name,
            recipe="shapes/branch_long",
            options={**LONG_AS_FIRST, **options, "batch.micro_batch": 288},
            iterations=iterations,
        )
        for name, (iterations, options) in ways.items()
    )
    suite = Suite(
        name="after_long",
        title="How few steps around the branch are enough for a long run",
        question="Does a long run get as far with 35% fewer passes: two second-order steps after the branch instead of three Euler steps, more prompts in fewer "
        "iterations, and a share of the prompts that explore a later step?",
        arms=arms,
        baseline=arms[0].name,
        seeds=SEEDS,
        options={**EVALUATION, "rewards": judged()},
        points=tuple(range(0, 400, 40)),  # a sentinel that goes back goes to one of these
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="Chosen with other seeds (research/benchmarks/long_runs.py, suite `long_cheap`).",
    )
    decides = [arm.name for arm in (arms[0], arms[-1])]
    return sized(suite, size, brief=decides, smoke=decides)


def going_back(size: Size) -> Suite:
    """branch_long as it is, with a sentinel that only warns, and with one that does so where a single step explores."""
    at_once, warned = {"batch.micro_batch": 288}, {"sentinel.action": "warn"}
    one_step = {"rollout.window.at": [2], "rollout.window.weights": None, "optimizer.lr": 1.2e-4}
    arms = (
        Arm(name="goes back", recipe="shapes/branch_long", options=at_once),
        Arm(name="only warned", recipe="shapes/branch_long", options={**at_once, **warned}),
        Arm(name="one step, only warned", recipe="shapes/branch_long", options={**at_once, **warned, **one_step}),
    )
    suite = Suite(
        name="going_back",
        title="Does going back save more than it costs?",
        question="In `after_long` the three seeds that missed the aim were those in which the sentinel went back, one of them while the total rose. Where do "
        "runs end that go on, and are those that a sentinel would have sent back the ones that end low?",
        arms=arms,
        baseline=arms[0].name,
        seeds=tuple(range(9001, 9009)),
        iterations=236,
        options={**EVALUATION, "rewards": judged()},
        points=tuple(range(0, 236, 25)),  # as often as a run of the recipe is evaluated
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="Seeds that no run had before. The last arm has the passes and iterations of the others, all prompts at one step, and the rate that "
        "`long_cheap` liked for that.",
    )
    return sized(suite, size, brief=[arm.name for arm in arms[:2]], smoke=[arm.name for arm in arms[:2]])


def _told(after: int, solver: str, before: int) -> str:
    return f"{after} {solver}{'' if before == WAYS[0][2] else f', {before} before'}"


def _options(after: int, solver: str, before: int) -> dict[str, object]:
    return {"rollout.after_steps": after, "rollout.solver": solver, "rollout.before_steps": before}
