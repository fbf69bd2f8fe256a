"""Methods, trust regions and KL coefficients run together, with the equaliser and without, and recipes are what they say they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_grpo import recipes
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.windows import Window
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.training.config import BatchConfig, UpdateConfig
from sage_grpo.training.planner import Planner
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


def test_a_window_that_will_run_out_of_steps_is_refused_before_the_first_rollout(make_config, make_trainer) -> None:
    """It slides onto the deterministic last step only in iteration 3, where one step is too few for two updates."""
    window = Window(kind="sliding", length=2, every=1)
    with pytest.raises(ValueError, match="has 1 trained steps"):
        make_trainer(make_config(rollout={"steps": 5, "window": window}, iterations=4))
    make_trainer(make_config(rollout={"steps": 5, "window": replace(window, stop=4)}, iterations=4))
    make_trainer(make_config(rollout={"steps": 5, "window": window}, iterations=3))


def test_a_fraction_of_the_steps_is_drawn_anew_every_iteration(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rollout={"steps": 11}, update=UpdateConfig(step_fraction=0.4)))
    drawn = [steps_of(trainer, n) for n in range(20)]
    assert all(len(parts) == 2 and sum(map(len, parts)) == 4 for parts in drawn)
    assert {step for parts in drawn for part in parts for step in part} == set(range(10))  # the last one is the ODE's
    assert drawn[3] == steps_of(trainer, 3)  # keyed, so a resumed run draws the same


SAMPLE = [f"shapes/{method}" for method in METHODS] + [f"{target}/branch" for target in TARGETS]


@pytest.mark.parametrize("name", SAMPLE)
def test_recipes_build_and_plan(name: str) -> None:
    config = recipes.recipe(name)
    target, method = name.split("/")
    assert config.out == f"runs/{target}-{method}"
    kernel = config.kernel.build()
    assert type(kernel).__name__.lower() == config.kernel.name.replace("_", "")
    planner = Planner(config, Schedule.shifted(config.rollout.steps, 5.0), kernel, trains=lambda sigma: True)
    planner.check()
    plan = planner.plan(config.iterations - 1, [Prompt(str(place)) for place in range(config.batch.prompts)])
    assert all(len(part) >= 1 for group in plan.groups for part in group.trained)
    # With one update the clip and the step-wise KL would be dead: then the method must not claim to have them.
    # `official` keeps the released code's one update.
    alive = plan.updates >= 2 or config.objective.lags
    assert alive or config.trust_region.mode in ("none", "fixed") or method == "official"


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
