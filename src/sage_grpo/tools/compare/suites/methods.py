"""Whole methods against one another: the paper's Table 2, and what more clips, prompts or trained steps give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.suites.common import (
    BRANCH_NATS,
    COLUMNS,
    DRIFT,
    FLICKER,
    FRESH,
    LONG_AS_FIRST,
    MEASURED,
    OVERALL,
    SETTING_A,
    SETTING_B,
    SHARPNESS,
    Size,
    judged,
    sized,
    suffixed,
    target_kl,
)

EXACT = {"kernel.name": "sage_exact", "kernel.sigma_max": None}
ALIKE = {
    "batch.trained_fraction": 1.0,
    "kernel.eta": 0.5,
    "advantage.scale": "group",
    "surrogate.clip_scale": 0.3,
    "kl.lambda_max": 1e-5,
    "update.step_fraction": 0.6,
    "update.deal": "steps",
}
"""What the paper's table has in common for all kernels. The recipes are as each method's authors run it, which is another comparison."""
METHODS = (
    Arm(name="dance", recipe="shapes/dance_grpo", options=ALIKE),
    Arm(name="flow", recipe="shapes/flow_grpo", options=ALIKE),
    Arm(name="cps", recipe="shapes/cps"),
    Arm(name="sage", recipe="shapes/sage_paper"),
    Arm(name="sage_exact", recipe="shapes/sage_paper", options=EXACT),
    Arm(name="branch", recipe="shapes/branch"),
)
WITHOUT_KL = {"trust_region.mode": "none"}
DUAL = {
    "trust_region.mode": "dual",
    "trust_region.beta_position": 1.0,
    "trust_region.beta_velocity": 0.1,
    "kl.kind": "two_stage",
    "kl.lambda_min": 1e-7,
    "kl.lambda_max": 1e-5,
}
"""The paper's trust region on any method."""
MATCHED = {"dance": 1.37363, "flow": 0.56953, "cps": 0.46208, "sage_exact": 0.47793}
"""The eta at which a kernel injects as much variance over a rollout (6 steps, shift 3) as sage does at 0.5."""
CLAIM = (
    "The paper's Table 2 ranks sage with its dual trust region above dance, flow and cps in reward setting B, from one run each, scored by the "
    "reward that was trained on."
)


def table2(size: Size) -> Suite:
    """The paper's Table 2 in reward setting B: six methods, without KL and with the dual one, and kernels at equal variance."""
    arms = suffixed(METHODS, "", WITHOUT_KL) + suffixed(METHODS, " + dual", DUAL)
    matched = {arm.name: arm for arm in METHODS}
    arms += tuple(
        Arm(
            name=f"{name} matched",
            recipe=matched[name].recipe,
            options={**matched[name].options, **WITHOUT_KL, "kernel.eta": eta},
        )
        for name, eta in MATCHED.items()
    )
    suite = Suite(
        name="table2",
        title="Methods, with and without the dual trust region (Table 2, setting B)",
        question=f"{CLAIM} Does the order hold over seeds, does the dual KL help, and what is left of it when kernels inject the same variance?",
        arms=arms,
        baseline="sage + dual",
        options={**MEASURED, "rewards": judged(SETTING_B)},
        iterations=45,
        points=(0, 15, 45),
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="Kernels marked `matched` inject as much variance over a rollout as sage does at eta 0.5; all others run at eta 0.5, branch at its own.",
    )
    order = ("sage + dual", "sage", "branch", "flow", "dance", "cps", "sage_exact")
    return sized(suite, size, brief=order, smoke=("sage + dual", "branch"))


def table2_a(size: Size) -> Suite:
    """The paper's Table 2 in reward setting A, where all parts weigh the same."""
    suite = Suite(
        name="table2_a",
        title="Methods, with and without the dual trust region (Table 2, setting A)",
        question="In setting A the paper finds that a KL costs reward for every method, and cps without one is best. Does that hold over seeds?",
        arms=suffixed(METHODS, "/a", WITHOUT_KL) + suffixed(METHODS, "/a + dual", DUAL),
        baseline="sage/a + dual",
        options={**MEASURED, "rewards": judged(SETTING_A)},
        iterations=45,
        points=(0, 15, 45),
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="Trained on TA + MQ + VQ; Overall is TA + MQ/2 + VQ/2 as everywhere, so that settings can be compared.",
    )
    return sized(suite, size, brief=("sage/a + dual", "sage/a", "branch/a"), smoke=("sage/a + dual", "branch/a"))


PAIRS = "shapes-pairs"
"""Folder of the clips that offline arms learn from, below the one in which the suite is run."""
MAKE_PAIRS = (
    "sage-grpo generate --prompts shapes --first 180 --per_prompt 12 --steps 6 --solver ab2 --batch 96 "
    f"--rewards '[{{name: shapes, weights: {{TA: 1, MQ: 0.5, VQ: 0.5}}, batch_size: 0}}]' --out {PAIRS}"
)
"""As many clips of as many prompts as an online arm samples and scores in 45 iterations, in the same groups and by the same solver."""


def preferences(size: Size) -> Suite:
    """What learning from which clip of a group is best gives, beside learning from all of them by how much they differ."""
    offline: Mapping[str, Any] = {"data.clips": f"{PAIRS}/pairs.jsonl"}
    arms = (
        Arm(name="branch", recipe="shapes/branch"),
        Arm(name="dpo", recipe="shapes/dpo"),
        Arm(name="dpo, half of the group", recipe="shapes/dpo", options={"batch.trained_fraction": 0.5}),
        Arm(
            name="dpo, moving anchor", recipe="shapes/dpo", options={"trust_region.mode": "moving", "anchor.every": 10}
        ),
        Arm(name="dpo, beta 50", recipe="shapes/dpo", options={"objective.beta": 50.0}),
        Arm(name="dpo offline", recipe="shapes/dpo", options=offline),
        Arm(name="rft", recipe="shapes/rft"),
        Arm(name="rft, best of the group", recipe="shapes/rft", options={"batch.trained_fraction": 0.05}),
        Arm(name="sft offline, best of 12", recipe="shapes/rft", options=offline),
    )
    suite = Suite(
        name="preferences",
        title="Preferences and rejection sampling against a policy gradient",
        question="DPO learns only which clip of a group is best and which one worst, rejection-sampling fine-tuning only from the best. How much of a policy "
        "gradient's gain is left at equal iterations, passes and rewards, and do clips stay sharp?",
        arms=arms,
        baseline="branch",
        options={**MEASURED, "rewards": judged()},
        iterations=45,
        points=(0, 15, 45),
        columns=(*COLUMNS, SHARPNESS),
        figures=("bars", "curves"),
        notes=f"Offline arms learn from clips of the base, which are made first, in the folder where the suite is run: `{MAKE_PAIRS}`. Their passes and rewards, "
        "which are those of an online arm, are not among the figures of the offline arms.",
    )
    return sized(suite, size, brief=("branch", "dpo", "dpo offline", "rft"), smoke=("branch", "dpo"))


def scaling(size: Size) -> Suite:
    """How to spend equal clips: many prompts or large groups, few or many trained steps."""
    clips = 8 if size == "smoke" else 48
    splits = (2, 4) if size == "smoke" else (2, 4, 8, 12, 16)
    arms = tuple(
        Arm(
            name=f"branch {prompts} x {clips // prompts}",
            recipe="shapes/branch",
            options={
                "batch.prompts": prompts,
                "batch.group_size": clips // prompts,
            },
        )
        for prompts in splits
    )
    # One update for all, so that only the number of steps differs.
    arms += tuple(
        Arm(
            name=f"sage {steps} of 5 steps",
            recipe="shapes/sage_paper",
            options={"update.step_fraction": steps / 5, "update.updates_per_rollout": 1, **WITHOUT_KL},
        )
        for steps in (1, 3, 5)
    )
    suite = Suite(
        name="scaling",
        title="Prompts x group size at equal clips, and trained steps",
        question="The paper takes groups of 4 and trains every step. At 48 clips an iteration, what do more prompts, larger groups and more trained "
        "steps give?",
        arms=arms,
        baseline=f"branch 4 x {clips // 4}",
        options={**MEASURED, "rewards": judged()},
        iterations=90,
        points=(0, 15, 45, 90),
        columns=(OVERALL, DRIFT, FLICKER),
        notes="Network passes are equal across the splits up to the shared prefix, which runs once a prompt.",
    )
    brief = ("branch 2 x 24", "branch 4 x 12", "branch 8 x 6", "branch 16 x 3")
    return sized(suite, size, brief=brief, smoke=("branch 2 x 4", "branch 4 x 2"), shorter=45)


def distance(size: Size) -> Suite:
    """How far a long run gets: with many prompts and a rate that falls to zero, and with few and one that stays."""
    falling = {"optimizer.lr": 7e-5, "optimizer.decay": "linear"}
    at_once = {**LONG_AS_FIRST, "batch.micro_batch": 192}
    warned = {**at_once, "sentinel.action": "warn"}
    arms = (
        Arm(name="branch_long", recipe="shapes/branch_long", options=at_once),
        Arm(name="branch_long, only warned", recipe="shapes/branch_long", options=warned),
        Arm(name="branch_long, 200 iterations", recipe="shapes/branch_long", options=warned, iterations=200),
        Arm(name="branch_long + target_kl", recipe="shapes/branch_long", options={**warned, **target_kl(BRANCH_NATS)}),
        Arm(
            name="32 prompts, 200 iterations",
            recipe="shapes/branch_long",
            options={**warned, "batch.prompts": 32, "batch.micro_batch": 384, "optimizer.lr": 1e-4},
            iterations=200,
        ),
        Arm(name="8 prompts", recipe="shapes/branch", options={"batch.prompts": 8, **falling}),
        Arm(name="4 prompts", recipe="shapes/branch", options={"batch.prompts": 4, **falling}),
        Arm(name="branch, 300 iterations", recipe="shapes/branch", iterations=300),
    )
    suite = Suite(
        name="distance",
        title="How far a long run gets",
        question="Methods stop at 40% of the way from the base to the ceiling. Is it the noise of their steps, which stays as the signal gets weaker? A rate "
        "that falls to zero and more prompts both lower it. And does a run that gets further stay on the manifold?",
        arms=arms,
        baseline="branch, 300 iterations",
        options={**MEASURED, "rewards": judged()},
        iterations=400,
        points=(0, 45, 90, 135, 200, 300, 400),
        columns=COLUMNS,
        notes="`branch_long` has 16 prompts; an iteration costs so many times the passes of one of 4. All rates but the baseline's fall to zero, from 7e-5, "
        "and with 32 prompts from 1e-4, in the passes of `branch_long`. Only `branch_long` itself acts on what its sentinel says.",
    )
    brief = ("branch_long", "branch_long, only warned", "branch, 300 iterations")
    return sized(suite, size, brief=brief, smoke=("branch_long", "branch, 300 iterations"))


def staleness(size: Size) -> Suite:
    """What clips of old weights cost: iterations between the weights that sample and those that learn."""
    arms = tuple(
        Arm(name=f"{method}, {old} old", recipe=f"shapes/{recipe}", options={"rollout.staleness": old})
        for method, recipe in (("branch", "branch"), ("sage", "sage_paper"))
        for old in (0, 1, 2, 4)
    )
    suite = Suite(
        name="staleness",
        title="Clips of old weights",
        question="Workers that sample while the trainer updates make clips of weights that are one iteration old or more. What does that cost per clip, so that one "
        "knows what the time that it saves must be worth?",
        arms=arms,
        baseline="branch, 0 old",
        options={**MEASURED, "rewards": judged()},
        seeds=FRESH,
        iterations=90,
        points=(0, 15, 45, 90),
        columns=(OVERALL, DRIFT, FLICKER),
        notes="Sampled in one process with old weights (`rollout.on here`): the numbers are those of workers, the seconds are not.",
    )
    return sized(
        suite, size, brief=("branch, 0 old", "branch, 4 old"), smoke=("branch, 0 old", "branch, 1 old"), shorter=45
    )
