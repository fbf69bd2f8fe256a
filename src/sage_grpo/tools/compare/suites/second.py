"""The questions of the first world, asked again in the second: another architecture, a larger picture, and a reward that was learned from votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.suites.common import (
    DRIFT,
    FLICKER,
    MEASURED,
    SETTING_B,
    UNTRAINED,
    Size,
    sized,
    target_kl,
)
from sage_grpo.tools.compare.suites.headline import METHODS, at_rate
from sage_grpo.tools.compare.suites.leash import ALL_STEPS, GOES_BACK, SHARE, constant
from sage_grpo.tools.compare.world import ceiling
from sage_grpo.worlds.world import SCENES

SEEDS = tuple(range(8001, 8009))
"""No run had these before."""
TUNING_SEEDS = (401, 402)
RATE_SEEDS = (403, 404, 405, 406)
ITERATIONS = 45
ON_A_GPU: Mapping[str, Any] = {"batch.prompts": 4, "batch.group_size": 8, "model.dtype": "bfloat16"}
"""More than the recipe has, which is for two CPU cores, and as real models are trained: an adapter in float32 on a base in bfloat16."""
PASSES, CLIPS = 8_280, 1_440
"""What 45 iterations of branch cost: samples through the network, and clips that are scored."""
RATES = (1e-4, 3e-4, 1e-3)
CHOSEN: Mapping[str, float] = {
    "branch": 3e-4,
    "sage": 1e-3,
    "sage x 2": 3e-4,
    "mix": 3e-4,
    "flow": 3e-4,
    "dance": 3e-4,
    "cps": 3e-4,
    "nft": 3e-4,
    "awm": 3e-4,
}
"""The rate of every method: the best of RATES on TUNING_SEEDS (suite `scenes_tuning`); of those at the edge the better one over 45 iterations (`scenes_rates`)."""
NATS: Mapping[str, float] = {"branch": 0.25, "sage": 8.5}
"""What a rollout's updates move the policy by at a rate of 3e-4, rounding's own 0.05 and 3.3 nats with it: a bfloat16 base cannot be nearer to itself."""
HOT = 1e-3
LEARNED = "scenes/reward"
"""Where the learned reward is: what `sage-grpo scenes reward --reward.out scenes/reward` writes."""
SMALLER = "./scenes-smaller/pipeline"
"""Where the smaller model is: what `sage-grpo scenes pretrain --pretrain.out scenes-smaller --pretrain.start scenes --pretrain.vae scenes --pretrain.blocks 6` writes."""
OVERALL = Column(key="Overall", ceiling=ceiling(SETTING_B, SCENES))
COLUMNS = (OVERALL, Column(key="VQ"), Column(key="MQ"), Column(key="TA"), DRIFT, FLICKER)
HACKED = (OVERALL, Column(key="total", label="learned reward"), DRIFT, FLICKER)
"""Under the learned reward, Overall is the judge's: the truth that no gradient has seen."""
SAGE = "scenes/sage_paper"


def judged() -> list[Mapping[str, Any]]:
    """Rewards: the judge counts."""
    return [{"name": "scenes", "weights": dict(SETTING_B), "batch_size": 0}, UNTRAINED]


def learned(watching: Mapping[str, float] = SETTING_B) -> list[Mapping[str, Any]]:
    """Rewards: the learned one counts, and the judge watches with these of its parts."""
    counts = {
        "name": "scenes_learned",
        "weights": dict(SETTING_B),
        "options": {"checkpoint": LEARNED},
        "batch_size": 0,
    }
    watches = {"name": "scenes", "weights": dict(watching), "metric_only": True, "batch_size": 0}
    return [counts, watches, UNTRAINED]


def scenes_headline(size: Size) -> Suite:
    """The nine methods of `headline` in the second world, at equal passes, equal reward calls and equal iterations."""
    suite = _suite(
        "scenes_headline",
        title="Methods as their authors run them, in the second world",
        question="Does the order of the methods in the first world (suite `headline`) hold with another architecture, a larger picture and a LoRA?",
        arms=[at_rate(arm, CHOSEN[arm.name], named=False) for arm in _methods()],
        baseline="branch",
        options={"rewards": judged()},
        points=(0,),
        passes=PASSES,
        clips=CLIPS,
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="A third of the iterations of `headline`: one takes about three times as long here.",
    )
    slow = ("nft", "awm")
    return sized(suite, size, brief=[a.name for a in suite.arms if a.name not in slow], smoke=("branch", "sage"))


def scenes_tuning(size: Size) -> Suite:
    """Three learning rates for every method of `scenes_headline`, on other seeds."""
    arms = [at_rate(arm, rate) for arm in _methods() for rate in RATES]
    suite = _suite(
        "scenes_tuning",
        title="The rate of every method in the second world",
        question="Which of three learning rates of a LoRA does each method learn most with? The best one is its rate in `scenes_headline`.",
        arms=arms,
        baseline=arms[1].name,
        options={"rewards": judged()},
        points=(0,),
        columns=(OVERALL, DRIFT),
        notes="Seeds below 1000 are for choosing; none of them is reported elsewhere.",
    )
    suite = replace(suite, seeds=TUNING_SEEDS, iterations=30)
    quick = [arm.name for arm in arms if arm.recipe not in ("scenes/nft", "scenes/awm")]
    return sized(suite, size, brief=quick, smoke=(arms[1].name, arms[4].name))


def scenes_rates(size: Size) -> Suite:
    """The two higher rates over the length of `scenes_headline`, for the methods whose best was the highest after 30 iterations."""
    at_the_edge = [arm for arm in _methods() if arm.name in ("branch", "sage", "flow", "cps")]
    arms = [at_rate(arm, rate) for arm in at_the_edge for rate in RATES[1:]]
    suite = _suite(
        "scenes_rates",
        title="The rate of a method over its whole length",
        question="`scenes_tuning` stopped after 30 iterations, and four methods liked the highest rate best. Do they over the 45 of `scenes_headline`?",
        arms=arms,
        baseline=arms[0].name,
        options={"rewards": judged()},
        points=(0, 30),
        columns=(OVERALL, DRIFT),
        notes="Seeds below 1000 are for choosing; none of them is reported elsewhere.",
    )
    brief = [arm.name for arm in arms if arm.name.startswith(("branch", "sage"))]
    return sized(replace(suite, seeds=RATE_SEEDS), size, brief=brief, smoke=brief[:2])


def scenes_equaliser(size: Size) -> Suite:
    """The equaliser on and off, at the recipe's steps and where the paper trains: 20 steps, shift 5."""
    regimes: dict[str, dict[str, Any]] = {"8 steps": {}, "20 steps": {"rollout.steps": 20, "model.shift": 5.0}}
    arms = [
        Arm(
            name=f"{kernel}, {steps}, {'equalised' if on else 'plain'}",
            recipe=SAGE,
            options={"kernel.name": kernel, "kernel.sigma_max": None, "surrogate.equalize": on, **regime},
        )
        for steps, regime in regimes.items()
        for kernel in ("sage", "flow")
        for on in (True, False)
    ]
    suite = _suite(
        "scenes_equaliser",
        title="The equaliser in the second world",
        question="Does dividing out the sensitivity of steps help here, at 8 steps and at 20 with shift 5?",
        arms=arms,
        baseline="sage, 8 steps, equalised",
        options={
            "rewards": judged(),
            **ALL_STEPS,
            "trust_region.mode": "none",
            "update.updates_per_rollout": 1,
        },
        points=(0, 15),
        columns=(OVERALL, DRIFT, FLICKER),
        figures=("steps", "curves"),
    )
    suite = replace(suite, iterations=30)
    return sized(
        suite,
        size,
        brief=[arm.name for arm in arms if arm.name.startswith("sage")],
        smoke=("sage, 8 steps, equalised", "sage, 8 steps, plain"),
    )


def scenes_hacking(size: Size) -> Suite:
    """Trust regions and a target KL under the learned reward, with the truth beside it."""
    ways: dict[str, dict[str, Any]] = {
        "no KL": {"trust_region.mode": "none"},
        "dual": {"trust_region.mode": "dual"},
        "fixed 0.1": {"trust_region.mode": "fixed", **constant(0.1)},
        "share": SHARE,
        "target KL": target_kl(NATS["sage"]),
    }
    arms = [Arm(name=f"sage, {way}", recipe=SAGE, options={**ALL_STEPS, **options}) for way, options in ways.items()]
    arms += [
        Arm(name="branch", recipe="scenes/branch"),
        Arm(name="branch, target KL", recipe="scenes/branch", options=target_kl(NATS["branch"])),
        Arm(name="branch, half rate", recipe="scenes/branch", options={"optimizer.lr": 1.5e-4}),
    ]
    honest = [Arm(name="branch on the judge", recipe="scenes/branch", options={"rewards": _judge_and_learned()})]
    # At the recipe's rate little is lost in 90 iterations; a hotter run gets to where the truth falls.
    hot = {"optimizer.lr": HOT}
    arms.append(Arm(name="branch, hot", recipe="scenes/branch", options=hot))
    arms.append(Arm(name="sage, no KL, hot", recipe=SAGE, options={**ALL_STEPS, **ways["no KL"], **hot}))
    honest.append(replace(honest[0], name="branch on the judge, hot", options={**honest[0].options, **hot}))
    suite = _suite(
        "scenes_hacking",
        title="Over-optimisation of a learned reward",
        question="How far do a reward that was learned from votes and the truth part, and does anything that holds a policy back keep more truth at the same "
        "learned reward?",
        arms=[*arms, *honest],
        baseline="branch",
        options={"rewards": learned()},
        points=(0, 10, 20, 30, 45, 60),
        columns=HACKED,
        notes="All arms but those on the judge are trained on the learned reward alone; Overall is the judge's. In the last two `learned reward` is the judge's total.",
    )
    suite = replace(suite, iterations=90)
    brief = ("sage, no KL", "sage, dual", "sage, target KL", "branch", "branch, target KL")
    return sized(suite, size, brief=brief, smoke=("branch", "sage, dual"), shorter=45)


def scenes_sentinel(size: Size) -> Suite:
    """The sentinel on the learned reward with true labels of a few prompts, scored on prompts that it never saw."""
    arms = (
        Arm(name="learned, only warned", recipe="scenes/branch"),
        Arm(name="learned, judge watches", recipe="scenes/branch", options=GOES_BACK),
        Arm(
            name="learned, VQ watches",
            recipe="scenes/branch",
            options={"rewards": learned({"VQ": 1.0}), **GOES_BACK},
        ),
        Arm(name="judge, goes back", recipe="scenes/branch", options={"rewards": judged(), **GOES_BACK}),
    )
    suite = _suite(
        "scenes_sentinel",
        title="The sentinel with a learned reward and few true labels",
        question="Do true labels of 32 prompts, looked at ten times in a run, let the sentinel save what a learned reward loses on other prompts?",
        arms=arms,
        baseline="learned, only warned",
        options={"rewards": learned(), "evaluate.prompts": 32, "evaluate.per_prompt": 4},
        points=(0, 5, 10, 15, 20, 30, 45, 60, 75),
        columns=(Column(key="unseen/Overall", label="Overall, unseen prompts"), *HACKED[:3]),
    )
    suite = replace(suite, iterations=90, unseen=True)
    return sized(suite, size, brief=[arm.name for arm in arms[:2]], smoke=[arm.name for arm in arms[:2]])


def scenes_prompts(size: Size) -> Suite:
    """The same 32 clips as few prompts with large groups, or as many prompts with small ones."""
    arms = [
        Arm(
            name=f"{method}, {prompts} x {32 // prompts}",
            recipe=recipe,
            options={**options, "batch.prompts": prompts, "batch.group_size": 32 // prompts},
        )
        for method, (recipe, options) in _two_ways().items()
        for prompts in (2, 4, 8, 16)
    ]
    suite = _suite(
        "scenes_prompts",
        title="Prompts and groups",
        question="At 32 clips an iteration, is it better to compare many clips of few prompts, or few clips of many?",
        arms=arms,
        baseline="branch, 4 x 8",
        options={"rewards": judged()},
        points=(0, 15),
        columns=(OVERALL, DRIFT, FLICKER),
    )
    return sized(suite, size, brief=[arm.name for arm in arms[:4]], smoke=("branch, 4 x 8", "sage, 4 x 8"), shorter=30)


def scenes_lora(size: Size) -> Suite:
    """Adapters of three ranks against all weights, each at two rates."""
    ways: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
        f"rank {rank}": ({"model.lora": {"rank": rank}}, (3e-4, 1e-3)) for rank in (4, 16, 64)
    }
    ways["all weights"] = ({"model.lora": None}, (1.5e-5, 5e-5))
    arms = [
        Arm(name=f"{name}, {rate:g}", recipe="scenes/branch", options={**options, "optimizer.lr": rate})
        for name, (options, rates) in ways.items()
        for rate in rates
    ]
    suite = _suite(
        "scenes_lora",
        title="LoRA against all weights",
        question="Does an adapter learn as much as all weights, with less drift, and does its rank matter?",
        arms=arms,
        baseline="rank 16, 0.0003",
        options={"rewards": judged()},
        points=(0, 15),
        columns=(OVERALL, DRIFT, FLICKER),
    )
    brief = [arm.name for arm in arms if arm.name.startswith(("rank 16", "all"))]
    return sized(suite, size, brief=brief, smoke=("rank 16, 0.0003", "all weights, 5e-05"), shorter=30)


def scenes_size(size: Size) -> Suite:
    """The shipped model and one with six of its eleven blocks, trained on, behind the same VAE."""
    models: dict[str, dict[str, Any]] = {"larger": {}, "smaller": {"model.path": SMALLER}}
    ways = [(method, recipe, options, 3e-4) for method, (recipe, options) in _two_ways().items()]
    ways.append(("branch, hot", "scenes/branch", {}, HOT))  # a size may want another rate
    arms = [
        Arm(name=f"{method}, {model}", recipe=recipe, options={**options, **path, "optimizer.lr": rate})
        for method, recipe, options, rate in ways
        for model, path in models.items()
    ]
    suite = _suite(
        "scenes_size",
        title="Two sizes of the model",
        question="Does a model with about half of the weights learn as much of what is left to learn, and is the order of two methods and two rates the same?",
        arms=arms,
        baseline="branch, larger",
        options={"rewards": judged()},
        points=(0, 15),
        columns=(OVERALL, DRIFT, FLICKER),
        notes="The smaller model is not part of the repository: docs/benchmark.md has the command that makes one.",
    )
    brief = [arm.name for arm in arms if not arm.name.startswith("sage")]
    return sized(suite, size, brief=brief, smoke=("branch, larger", "branch, smaller"), shorter=30)


def _methods() -> list[Arm]:
    """The methods of `headline` on this world's target."""
    return [replace(arm, recipe=arm.recipe.replace("shapes/", "scenes/", 1)) for arm in METHODS]


def _two_ways() -> dict[str, tuple[str, dict[str, Any]]]:
    once = {**ALL_STEPS, "update.updates_per_rollout": 1, "trust_region.mode": "none"}
    return {"branch": ("scenes/branch", {}), "sage": (SAGE, once)}


def _judge_and_learned() -> list[Mapping[str, Any]]:
    """The judge counts, the learned reward only watches."""
    counts, watches, untrained = learned()
    return [{**watches, "metric_only": False}, {**counts, "metric_only": True}, untrained]


def _suite(name: str, *, arms: Sequence[Arm], options: Mapping[str, Any], **fields: Any) -> Suite:
    """A suite of this world, with its seeds, iterations, batch and evaluation."""
    settings = {**MEASURED, **ON_A_GPU, **options}
    return Suite(name=name, arms=tuple(arms), seeds=SEEDS, iterations=ITERATIONS, options=settings, **fields)
