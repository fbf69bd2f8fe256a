"""What holds a policy back: schedules of the KL coefficient, strategies, updates per rollout, and a reward that can be hacked."""

from __future__ import annotations

from typing import Any

from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.suites.common import (
    BRANCH_NATS,
    COLUMNS,
    DRIFT,
    FLICKER,
    FRESH,
    MEASURED,
    OVERALL,
    SAGE_NATS,
    UNTRAINED,
    Size,
    judged,
    proxied,
    sized,
    target_kl,
)

RECIPE = "shapes/sage_paper"
ALL_STEPS = {"update.step_fraction": 1.0}
"""Runs that train every step fall back after 90 to 135 iterations: there a trust region must earn its keep."""
SHARE: dict[str, Any] = {"kl.kind": "share", "trust_region.mode": "dual"}

GOES_BACK: dict[str, Any] = {"sentinel.action": "rollback"}
"""A sentinel that acts."""
VQ_WATCHES: dict[str, Any] = {
    "name": "shapes",
    "label": "quality",
    "weights": {"VQ": 1.0},
    "metric_only": True,
    "batch_size": 0,
}
"""An honest witness that knows less than the judge."""


def ramp(low: float, high: float) -> dict[str, Any]:
    """The two-stage coefficient; the ramp ends after half of a run of 45 iterations."""
    return {"kl.kind": "two_stage", "kl.lambda_min": low, "kl.lambda_max": high, "kl.warmup_updates": 45}


def constant(value: float) -> dict[str, Any]:
    """A constant coefficient."""
    return {"kl.kind": "constant", "kl.lambda_min": value, "kl.lambda_max": value}


def schedule(size: Size) -> Suite:
    """Schedules of the KL coefficient: the paper's three, feedback, and values that act."""
    feedback = {**ramp(1e-7, 1e-5), "kl.target": 1e-4}
    arms = (
        Arm(name="two-stage 1e-7 to 1e-5", recipe=RECIPE, options=ramp(1e-7, 1e-5)),
        Arm(name="constant 1e-5", recipe=RECIPE, options=constant(1e-5)),
        Arm(name="two-stage 1e-7 to 1e-6", recipe=RECIPE, options=ramp(1e-7, 1e-6)),
        Arm(name="no KL", recipe=RECIPE, options={"trust_region.mode": "none"}),
        Arm(name="paper's feedback", recipe=RECIPE, options={**feedback, "kl.kind": "paper"}),
        Arm(name="PPO's feedback", recipe=RECIPE, options={**feedback, "kl.kind": "ppo"}),
        Arm(name="constant 0.1", recipe=RECIPE, options=constant(0.1)),
        Arm(name="two-stage 1e-2 to 1", recipe=RECIPE, options=ramp(1e-2, 1.0)),
    )
    suite = Suite(
        name="schedule",
        title="Schedules of the KL coefficient (figure 7)",
        question="The paper finds a ramp from 1e-7 to 1e-5 better than a constant 1e-5 and a ramp to 1e-6. Do these differ at all, and what does a "
        "coefficient do that is large enough to act?",
        arms=arms,
        baseline="two-stage 1e-7 to 1e-5",
        options={**MEASURED, "rewards": judged()},
        iterations=60,
        points=(0, 15, 45, 60),
        columns=COLUMNS,
    )
    brief = ("two-stage 1e-7 to 1e-5", "constant 1e-5", "two-stage 1e-7 to 1e-6", "no KL")
    smoke = ("two-stage 1e-7 to 1e-5", "constant 1e-5")
    return sized(suite, size, brief=brief, smoke=smoke, shorter=45)


def strategies(updates: int) -> tuple[Arm, ...]:
    """Every way to hold a policy, with this many updates a rollout."""
    own = {**ALL_STEPS, "update.updates_per_rollout": updates}
    modes: dict[str, dict[str, Any]] = {
        mode: {"trust_region.mode": mode} for mode in ("none", "fixed", "moving", "dual")
    }
    modes |= {"share": SHARE, "target_kl": target_kl(SAGE_NATS)}
    return tuple(Arm(name=f"{name} x{updates}", recipe=RECIPE, options={**own, **mode}) for name, mode in modes.items())


def strategy(size: Size) -> Suite:
    """Strategies of the trust region over 135 iterations, two updates a rollout; relative ones beside the paper's."""
    suite = Suite(
        name="strategy",
        title="Strategies of the trust region (figure 8)",
        question="The paper claims that the dual trust region learns fastest, ends highest and keeps exploring, while others collapse or stall. Is that so "
        "at its coefficients, and do regions that are relative (a share of the gradient, a target KL per rollout) hold better?",
        arms=strategies(2),
        baseline="dual x2",
        options={**MEASURED, "rewards": judged()},
        iterations=135,
        points=(0, 45, 90, 135),
        columns=COLUMNS,
    )
    brief = ("none x2", "dual x2", "share x2", "target_kl x2")
    return sized(suite, size, brief=brief, smoke=("dual x2", "target_kl x2"))


def strategy_updates(size: Size) -> Suite:
    """The same with 1 and 4 updates a rollout: with one, the clip and the step-wise KL cannot act."""
    kept = ("none", "dual", "target_kl")
    arms = tuple(arm for updates in (1, 4) for arm in strategies(updates) if arm.name.split()[0] in kept)
    suite = Suite(
        name="strategy_updates",
        title="Updates per rollout (figure 8, continued)",
        question="A rollout that is used once cannot move its own ratio, so the clip and the step-wise KL are dead. Does using it four times learn faster, "
        "and is a trust region needed then?",
        arms=arms,
        baseline="none x1",
        options={**MEASURED, "rewards": judged()},
        iterations=135,
        points=(0, 45, 90, 135),
        columns=(OVERALL, DRIFT, FLICKER),
        notes="The steps of a rollout are dealt out to its updates, so that passes are equal.",
    )
    return sized(suite, size, brief=("none x1", "none x4", "target_kl x4"), smoke=("none x1", "none x4"), shorter=45)


def heat(size: Size) -> Suite:
    """Learning rates over a factor of ten for 300 iterations of branch, without a region and with a target KL."""
    ways: dict[str, dict[str, Any]] = {"none": {}, "target_kl": target_kl(BRANCH_NATS)}
    pairs = (("none", 5e-5), ("none", 2e-4), ("target_kl", 2e-5), ("target_kl", 5e-5), ("target_kl", 2e-4))
    arms = tuple(
        Arm(name=f"{way} {lr:.0e}", recipe="shapes/branch", options={**ways[way], "optimizer.lr": lr})
        for way, lr in pairs
    )
    suite = Suite(
        name="heat",
        title="Learning rates over a factor of ten",
        question="A trust region that acts must keep a run that is four times too hot from collapsing, and must cost a good one nothing.",
        arms=arms,
        baseline="none 5e-05",
        options={**MEASURED, "rewards": judged()},
        iterations=300,
        points=(0, 45, 90, 135, 200, 300),
        columns=(OVERALL, DRIFT, FLICKER),
    )
    brief = tuple(arm.name for arm in arms if arm.options["optimizer.lr"] > 2e-5)
    return sized(suite, size, brief=brief, smoke=("none 5e-05", "target_kl 2e-04"), shorter=90)


def hacking(size: Size) -> Suite:
    """A naive proxy as the reward, the true judge as a witness."""
    proxy = {"rewards": proxied()}
    sage = {**ALL_STEPS, **proxy}
    arms = (
        Arm(name="proxy, sage + dual", recipe=RECIPE, options=sage),
        Arm(name="proxy, sage no KL", recipe=RECIPE, options={**sage, "trust_region.mode": "none"}),
        Arm(
            name="proxy, sage fixed 1",
            recipe=RECIPE,
            options={**sage, "trust_region.mode": "fixed", **constant(1.0)},
        ),
        Arm(name="proxy, sage share", recipe=RECIPE, options={**sage, **SHARE}),
        Arm(name="proxy, branch", recipe="shapes/branch", options=proxy),
        Arm(name="judge, sage + dual", recipe=RECIPE, options={**ALL_STEPS, "rewards": _judge_and_proxy()}),
    )
    suite = Suite(
        name="hacking",
        title="Reward hacking: a naive proxy against the true judge",
        question="The paper says that trust regions keep a policy from hacking its reward. The proxy rewards colour, saturation and change; the judge tells "
        "what the clips are worth. How far do they part, and does any region hold?",
        arms=arms,
        baseline="proxy, sage + dual",
        options=MEASURED,
        iterations=90,
        points=(0, 45, 90),
        columns=(OVERALL, Column(key="proxy"), DRIFT, FLICKER),
        notes="All but the last arm are trained on the proxy alone: Overall is then the truth that no gradient has seen.",
    )
    brief = ("proxy, sage + dual", "proxy, sage no KL", "proxy, sage fixed 1", "proxy, branch")
    return sized(suite, size, brief=brief, smoke=("proxy, sage + dual", "proxy, branch"), shorter=45)


def sentinel(size: Size) -> Suite:
    """The naive proxy with a sentinel that only looks, and with one that acts; and the judge, on which it should stay silent.

    A witness must be trusted: the proxy falls honestly while the judge is trained on, so it cannot watch the judge. The judge's VQ can.
    """
    arms = (
        Arm(name="proxy, sentinel warns", recipe="shapes/branch", options={"rewards": proxied()}),
        Arm(
            name="proxy, sentinel goes back",
            recipe="shapes/branch",
            options={"rewards": proxied(), **GOES_BACK},
        ),
        Arm(
            name="proxy, sentinel lowers lr",
            recipe="shapes/branch",
            options={"rewards": proxied(), "sentinel.action": "lower_lr"},
        ),
        Arm(name="judge, sentinel goes back", recipe="shapes/branch", options={"rewards": judged(), **GOES_BACK}),
        Arm(
            name="judge watched by VQ, sentinel goes back",
            recipe="shapes/branch",
            options={"rewards": [*judged(), VQ_WATCHES], **GOES_BACK},
        ),
    )
    suite = Suite(
        name="sentinel",
        title="The sentinel on a reward that can be hacked",
        question="Does the sentinel speak before the true score has lost a third of its peak gain, does going back end with a better true score than only "
        "looking, and does it stay silent on a healthy run?",
        arms=arms,
        baseline="proxy, sentinel warns",
        options={**MEASURED, "evaluate.per_prompt": 4},
        iterations=60,
        points=(0, 2, 4, 6, 8, 10, 12, 15, 20, 30, 45, 60),
        columns=(OVERALL, DRIFT),
        notes="What the sentinel said and did is in each row of runs.jsonl under `sentinel`: iteration, finding, action. Four clips of each held-out "
        "prompt, because the gain of the true score before it falls is of the size of the noise of 128 clips.",
    )
    both = ("proxy, sentinel warns", "proxy, sentinel goes back")
    judge = ("judge, sentinel goes back", "judge watched by VQ, sentinel goes back")
    return sized(suite, size, brief=(*both, *judge), smoke=both, shorter=45)


def dose(size: Size) -> Suite:
    """The KL coefficient from where it is inert to where nothing is learned, on the judge and on the proxy."""
    ways: dict[str, dict[str, Any]] = {"none": {"trust_region.mode": "none"}}
    ways |= {f"{value:g}": {"trust_region.mode": "dual", **constant(value)} for value in (1e-5, 1e-3, 1e-2, 0.1, 1.0)}
    rewards = {"judge": _judge_and_proxy(), "proxy": proxied()}
    arms = tuple(
        Arm(name=f"{reward}, {way}", recipe=RECIPE, options={**ALL_STEPS, "rewards": given, **options})
        for reward, given in rewards.items()
        for way, options in ways.items()
    )
    suite = Suite(
        name="dose",
        title="How much KL",
        question="From which coefficient on does the dual KL act, what does it cost an honest reward, and how much truth is left of a proxy at the same gain in "
        "the proxy?",
        arms=arms,
        baseline="judge, none",
        seeds=FRESH,
        options=MEASURED,
        iterations=45,
        points=(0, 4, 8, 12, 16, 24, 32, 45),
        columns=(OVERALL, Column(key="proxy"), DRIFT),
        notes="Two updates of all steps, so that the KL to the rollout's policy has a gradient.",
    )
    brief = ("judge, none", "judge, 1e-05", "judge, 0.1", "proxy, none", "proxy, 0.1")
    return sized(suite, size, brief=brief, smoke=("judge, none", "proxy, 0.1"))


def taken(size: Size) -> Suite:
    """A target KL that was taken at another rate, or from another method, at rates that are too high."""
    hot = {"branch": 2e-4, "sage": 1e-4}
    recipes: dict[str, tuple[str, dict[str, Any]]] = {
        "branch": ("shapes/branch", {}),
        "sage": (RECIPE, {**ALL_STEPS, "update.updates_per_rollout": 1, "trust_region.mode": "none"}),
    }
    # A KL goes as the square of the rate.
    branch, sage = {"5e-5": BRANCH_NATS, "2e-5": 0.16 * BRANCH_NATS, "1e-4": 4 * BRANCH_NATS}, {"5e-5": SAGE_NATS}
    targets = {
        "branch": {**{f"branch at {at}": nats for at, nats in branch.items()}, "sage at 5e-5": SAGE_NATS},
        "sage": {**{f"sage at {at}": nats for at, nats in sage.items()}, "branch at 5e-5": BRANCH_NATS},
    }
    arms = []
    for name, (recipe, options) in recipes.items():
        own = {**options, "optimizer.lr": hot[name]}
        arms.append(Arm(name=f"{name} {hot[name]:g}, no target", recipe=recipe, options=own))
        arms += [
            Arm(name=f"{name} {hot[name]:g}, {told}", recipe=recipe, options={**own, **target_kl(nats)})
            for told, nats in targets[name].items()
        ]
    suite = Suite(
        name="taken",
        title="Targets taken elsewhere",
        question="A target KL that was taken at a good rate brings a hot one back to it. What does a target do that comes from another rate, or from another "
        "method?",
        arms=tuple(arms),
        baseline=arms[1].name,
        seeds=FRESH,
        options={**MEASURED, "rewards": judged()},
        iterations=135,
        points=(0, 45, 135),
        columns=(OVERALL, DRIFT),
    )
    return sized(suite, size, brief=[arm.name for arm in arms[:5]], smoke=(arms[1].name, arms[0].name))


def witness(size: Size) -> Suite:
    """The sentinel with a witness that knows less than the judge, scored on prompts that it never saw."""
    proxy, less = proxied()[0], [VQ_WATCHES, UNTRAINED]
    arms = (
        Arm(name="proxy, only warned", recipe="shapes/branch", options={"rewards": proxied()}),
        Arm(name="proxy, judge watches", recipe="shapes/branch", options={"rewards": proxied(), **GOES_BACK}),
        Arm(name="proxy, VQ watches", recipe="shapes/branch", options={"rewards": [proxy, *less], **GOES_BACK}),
        Arm(name="judge, VQ watches", recipe="shapes/branch", options={"rewards": [judged()[0], *less], **GOES_BACK}),
        Arm(name="judge, only warned", recipe="shapes/branch", options={"rewards": judged()}),
    )
    suite = Suite(
        name="witness",
        title="A sentinel with an imperfect witness",
        question="Does going back still help where the witness knows only a part of the truth, on prompts that neither it nor the sentinel saw? Its limits are the "
        "defaults, fixed before.",
        arms=arms,
        baseline="proxy, only warned",
        seeds=FRESH,
        options={**MEASURED, "evaluate.per_prompt": 4},
        iterations=45,
        points=(0, 2, 4, 6, 8, 10, 12, 15, 20, 30, 45),
        unseen=True,
        columns=(Column(key="unseen/Overall", label="Overall, unseen prompts"), OVERALL, DRIFT),
    )
    return sized(suite, size, brief=[arm.name for arm in arms[:3]], smoke=("proxy, only warned", "proxy, VQ watches"))


def _judge_and_proxy() -> list[Any]:
    """The judge counts, the proxy only watches."""
    watching = {"name": "shapes_proxy", "weights": {"proxy": 1.0}, "metric_only": True, "batch_size": 0}
    return [*judged(), watching]
