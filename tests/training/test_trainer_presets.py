"""Methods, trust regions and KL coefficients run together, with the equaliser and without, and recipes are what they say they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_grpo import recipes
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.training.config import BatchConfig
from trainer_helpers import assert_resumes_to_the_bit, of_method, plan_of, same, steps_of, weights_of

MODES = ("none", "fixed", "stepwise", "moving", "dual")
KINDS = ("constant", "two_stage", "paper", "ppo")


def pairs() -> list[tuple[str, str, str, bool]]:
    """Method, mode, kind of coefficient and whether steps are equalised: two modes a method, and every mode meets every kind."""
    found = []
    for row, method in enumerate(METHODS):
        for column in {(2 * row) % len(MODES), (2 * row + 1) % len(MODES)}:
            kind, equalize = KINDS[(row + column) % len(KINDS)], (row // len(KINDS) + column) % 2 == 0
            found.append((method, MODES[column], kind, equalize))
    return found


@pytest.mark.parametrize(("method", "mode", "kind", "equalize"), pairs())
def test_settings_run_together(method: str, mode: str, kind: str, equalize: bool, make_config, make_trainer) -> None:
    batch = BatchConfig(prompts=2, group_size=3, micro_batch=6)
    base = of_method(method, make_config(rollout={"steps": 5}, iterations=8, batch=batch))
    if base.objective.credit == "exact":
        mode = "none"  # no other goes with it
    if base.objective.by_choice:
        mode = "fixed"  # a choice needs its anchor and has no old policy
    config = replace(
        base,
        trust_region=replace(base.trust_region, mode=mode),
        kl=KlCoefficient(kind=kind, warmup_updates=1),
        surrogate=replace(base.surrogate, equalize=equalize and not base.objective.fresh),
    )
    check_iteration(make_trainer(config))


def check_iteration(trainer) -> None:
    config, before, plan = trainer.config, weights_of(trainer), plan_of(trainer)
    metrics = trainer.step()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.get("ratio/first_log") == (0.0 if config.objective.kind in ("surrogate", "awm") else None)
    assert ("matching/error" in metrics) == (config.objective.kind not in ("surrogate", "gradient"))
    assert not same(before, weights_of(trainer))
    region = config.trust_region
    assert ("kl/position" in metrics) == region.uses_anchor == (trainer.state.anchor is not None)
    assert ("kl/velocity" in metrics) == region.uses_stepwise
    # With one update the policy is still its own reference.
    assert (metrics["kl/total"] > 0) == (region.mode != "none" and plan.updates > 1)
    steps = [name.removeprefix("gradient/raw/") for name in metrics if name.startswith("gradient/raw/")]
    assert {int(step) for step in steps} == {label for update in range(plan.updates) for label in plan.labels(update)}
    unchanged = [metrics[f"gradient/raw/{s}"] == metrics[f"gradient/equalized/{s}"] for s in steps]
    assert all(unchanged) or config.surrogate.equalize


def test_mix_grpo_explores_and_trains_inside_its_window(make_config, make_trainer) -> None:
    config = METHODS["mix_grpo"](make_config(rollout={"steps": 12}, iterations=16))
    window = replace(config.rollout.window, every=2)  # the preset's 25 take long
    trainer = make_trainer(replace(config, rollout=replace(config.rollout, window=window)))
    seen = []
    for iteration in range(4):
        trained = {step for part in steps_of(trainer, iteration) for step in part}
        metrics = trainer.step()
        assert {int(name[-3:]) for name in metrics if name.startswith("gradient/raw/")} == trained
        seen.append(trained)
    assert len(seen[0]) == 2
    assert min(seen[-1]) > min(seen[0])


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_another_method_is_left_in_sage_paper(method: str) -> None:
    """What a target's defaults become, when they follow the evidence, does not reach it: it states all that methods set."""
    paper, target = METHODS["sage_paper"], recipes.recipe("shapes/sage")
    other = paper(METHODS[method](target))
    other = replace(other, update=replace(other.update, step_fraction=target.update.step_fraction))  # the target's
    other = replace(other, surrogate=replace(other.surrogate, clip_scale=target.surrogate.clip_scale))  # likewise
    other = replace(other, model=target.model)  # guidance is the checkpoint's, unless a method takes it away
    if method == "branch_long":  # the one that says how long and how fast, which is the target's too
        other = replace(other, iterations=target.iterations, batch=target.batch, optimizer=target.optimizer)
    assert other == paper(target)


QUICK = ("sage", "branch", "nft", "dpo")
"""Methods of every kind: all steps, one shared step, none, a choice."""


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_every_method_resumes_to_the_bit(method: str, make_config, make_trainer, tmp_path) -> None:
    config = of_method(method, make_config(rollout={"steps": 6}, iterations=4))
    assert_resumes_to_the_bit(make_trainer, config, tmp_path / "checkpoints")
