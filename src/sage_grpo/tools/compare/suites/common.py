"""What all suites share: the world's rewards and columns, sizes, and what a suite will cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sage_grpo.tools.compare.design import FIRST_SEED, Arm, Column, Suite
from sage_grpo.tools.compare.world import ceiling

Size = Literal["smoke", "brief", "full"]
"""smoke: two arms and seconds of two CPU cores, to see that it runs. brief: the arms that decide, a few minutes of one GPU. full: all of it, about
ten minutes of one GPU."""
SETTING_A: Mapping[str, float] = {"TA": 1.0, "MQ": 1.0, "VQ": 1.0}
"""The paper's averaged reward."""
SETTING_B: Mapping[str, float] = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
"""The paper's alignment-focused reward; the judge's Overall is this sum, whatever a run is trained on."""
UNTRAINED: Mapping[str, Any] = {
    "name": "video_stats",
    "label": "untrained",
    "metric_only": True,
    "weights": {"flicker": 0.0, "sharpness": 0.0},
    "options": {"parts": ["flicker", "sharpness"]},  # the others estimate motion, which takes as long as the judge
    "batch_size": 0,
}
"""What nothing is trained on and the judge does not compute: unsteady light over time, and blur."""
OVERALL = Column(key="Overall", ceiling=ceiling(SETTING_B))
DRIFT = Column(key="drift", higher=False)
FLICKER = Column(key="flicker", label="flicker (untrained)", higher=False)
SHARPNESS = Column(key="sharpness", label="sharpness (untrained)")
COLUMNS = (OVERALL, Column(key="VQ"), Column(key="MQ"), Column(key="TA"), DRIFT, FLICKER)
"""The columns of the paper's Table 2, with the true drift, and a metric that is not trained on in the place of CLIPScore."""
SEEDS = tuple(range(FIRST_SEED, FIRST_SEED + 8))
FRESH = tuple(range(7001, 7009))
"""Seeds of suites that were designed after results with SEEDS were known."""
MEASURED: Mapping[str, Any] = {
    "evaluate.prompts": 128,
    "evaluate.steps": 20,
}
"""How every run of a suite is evaluated (the rules of docs/benchmark.md)."""
TINY: Mapping[str, Any] = {
    "batch.prompts": 2,
    "batch.group_size": 2,
    "batch.micro_batch": 4,
    "evaluate.prompts": 2,
    "evaluate.steps": 2,
    "model.dtype": "float32",
}
BRANCH_NATS, SAGE_NATS = 0.01, 0.4
"""What a rollout's updates move the policy by at the good learning rate of 5e-5: branch, and sage with all steps trained."""
LONG_AS_FIRST: Mapping[str, Any] = {
    "batch.prompts": 16,
    "optimizer.lr": 7e-5,
    "rollout.window.at": [2],
    "rollout.window.weights": None,
    "rollout.solver": "euler",
    "rollout.before_steps": None,
    "rollout.after_steps": None,
}
"""What `shapes/branch_long` had, for 400 iterations, before research/results/after_long was measured. Suites that are older say it, so that they stay what was
measured."""
PER_ITERATION, PER_EVALUATION, PER_RUN = 0.044, 0.05, 0.2
"""Seconds of one H200 that an iteration of sage, an evaluation and a start take when 16 processes share it (`seconds` of the rows in
research/results/table2 and research/results/distance, over 16)."""
SHARES: Mapping[str, float] = {
    **{"branch": 0.45, "branch_long": 0.7, "flow_grpo": 2.0, "nft": 4.3, "awm": 3.1},
    **dict.fromkeys(("refl", "draft", "adjoint"), 2.0),
}
"""What an iteration of other methods takes of that (research/results/headline); by the reward's gradient a guess, from two CPU cores."""
WORLD_SHARES: Mapping[str, float] = {"scenes": 3.0}
"""What an iteration and an evaluation take of that in another world (research/results/scenes_headline and scenes_hacking: 2.8 and 3.5)."""


def judged(weights: Mapping[str, float] = SETTING_B) -> list[Mapping[str, Any]]:
    """Rewards: the judge with these weights, and what is only measured."""
    return [{"name": "shapes", "weights": dict(weights), "batch_size": 0}, UNTRAINED]


def proxied() -> list[Mapping[str, Any]]:
    """Rewards: the naive proxy counts, the judge only watches."""
    watching = {"name": "shapes", "weights": dict(SETTING_B), "metric_only": True, "batch_size": 0}
    return [{"name": "shapes_proxy", "weights": {"proxy": 1.0}, "batch_size": 0}, watching, UNTRAINED]


def target_kl(nats: float) -> dict[str, Any]:
    """A learning rate that follows the KL of a rollout's updates, and takes back what went five times too far."""
    return {"trust_region.mode": "none", "optimizer.target_kl": nats, "optimizer.max_kl": 5 * nats}


def expected_seconds(suite: Suite) -> float:
    """What the suite will take of one H200 with 16 processes side by side, by the rates above."""
    total = 0.0
    for arm in suite.arms:
        iterations = arm.iterations or suite.iterations or 45
        target, _, method = arm.recipe.partition("/")
        rate, scale = PER_ITERATION * SHARES.get(method, 1.0), WORLD_SHARES.get(target, 1.0)
        evaluations = 0 if suite.kind == "rollout" else len({iterations, *(suite.points or ())} - {0})
        total += len(suite.seeds) * (PER_RUN + scale * (iterations * rate + evaluations * PER_EVALUATION))
    return total


def sized(suite: Suite, size: Size, *, brief: Sequence[str], smoke: Sequence[str], shorter: int | None = None) -> Suite:
    """The suite at a size: `brief` and `smoke` name the arms that stay; `shorter` are the iterations of brief."""
    if size == "full":
        return _priced(suite)
    kept = brief if size == "brief" else smoke
    arms = tuple(arm for arm in suite.arms if arm.name in kept)
    if size == "brief":
        iterations = shorter or suite.iterations
        points = None if suite.points is None else tuple(p for p in suite.points if p <= (iterations or p))
        return _priced(replace(suite, arms=arms, iterations=iterations, points=points))
    arms = tuple(replace(arm, iterations=None) for arm in arms)
    return replace(suite, arms=arms, seeds=SEEDS[:2], iterations=2, points=(0, 2), options={**suite.options, **TINY})


def _priced(suite: Suite) -> Suite:
    price = f"Estimated at {expected_seconds(suite):.0f} s of one H200 with 16 runs side by side."
    return replace(suite, notes="\n\n".join(note for note in (suite.notes, price) if note))


def suffixed(arms: Sequence[Arm], suffix: str, options: Mapping[str, Any]) -> tuple[Arm, ...]:
    """The same arms under longer names, with further options."""
    return tuple(replace(arm, name=arm.name + suffix, options={**arm.options, **options}) for arm in arms)
