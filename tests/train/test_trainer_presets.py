"""Every method x trust region x KL coefficient x equaliser runs, and is what it says it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from trainer_helpers import plan_of, same, steps_of, weights_of

from sage_grpo import recipes
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.windows import Window
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.train.config import BatchConfig, UpdateConfig
from sage_grpo.train.plan import Planner

MODES = ("none", "fixed", "stepwise", "moving", "dual")
KINDS = ("constant", "two_stage", "paper", "ppo")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_every_combination_runs(method: str, mode: str, make_config, make_trainer) -> None:
    batch = BatchConfig(prompts=2, group_size=3, micro_batch=6)
    base = METHODS[method](make_config(rollout={"steps": 5}, iterations=8, batch=batch))
    for kind in KINDS:
        for equalize in (False, True):
            config = replace(
                base,
                trust_region=replace(base.trust_region, mode=mode),
                kl=KlCoefficient(kind=kind, warmup_updates=1),
                surrogate=replace(base.surrogate, equalize=equalize),
            )
            check_iteration(make_trainer(config))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_a_real_architecture(method: str, make_config, make_trainer) -> None:
    config = make_config(
        kind="hunyuan15_t2v", rollout={"steps": 4}, batch=BatchConfig(prompts=1, group_size=4, micro_batch=4)
    )
    check_iteration(make_trainer(METHODS[method](config)))


def check_iteration(trainer) -> None:
    config, before, plan = trainer.config, weights_of(trainer), plan_of(trainer)
    metrics = trainer.step()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["ratio/first_update"] == 0.0
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
    config = METHODS["mix_grpo"](make_config(rollout={"steps": 8}, iterations=16))
    trainer = make_trainer(config)
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


def test_no_exploration_is_refused(make_config, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"kernel\.eta is 0"):
        make_trainer(make_config(kernel=KernelSpec(name="sage", eta=0.0)))


def test_a_fraction_of_the_steps_is_drawn_anew_every_iteration(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rollout={"steps": 11}, update=UpdateConfig(step_fraction=0.4)))
    drawn = [steps_of(trainer, n) for n in range(20)]
    assert all(len(parts) == 2 and sum(map(len, parts)) == 4 for parts in drawn)
    assert {step for parts in drawn for part in parts for step in part} == set(range(10))  # the last one is the ODE's
    assert drawn[3] == steps_of(trainer, 3)  # keyed, so a resumed run draws the same


def test_steps_go_from_noise_to_data_without_permutation(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rollout={"steps": 9}, update=UpdateConfig(permute_steps=False)))
    assert steps_of(trainer) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def first_steps(trainer, iteration: int) -> list:
    """The records of the first step of every micro-batch."""
    records = trainer.roll_out(plan_of(trainer, iteration)).records
    return [record for replay, record in records.items() if replay.step == 0]


def test_members_of_a_group_start_from_the_same_noise_only_when_asked(make_config, make_trainer) -> None:
    for same_noise in (False, True):
        trainer = make_trainer(make_config(rollout={"same_noise": same_noise, "share": False}))
        first, second = (first_steps(trainer, iteration) for iteration in (0, 1))
        starts = [record.x for record in first]
        assert (starts[0][0] == starts[0][1]).all() == same_noise
        assert not (starts[0] == starts[1]).any()  # another prompt
        assert not (starts[0] == second[0].x).any()  # another iteration: the official code repeats its noises
        assert not (first[0].x_next[0] == first[0].x_next[1]).all()  # exploration differs in any case


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_builds_and_plans(name: str) -> None:
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
    assert plan.updates >= 2 or config.trust_region.mode in ("none", "fixed")


def test_recipe_shorthands_and_the_nearest_name() -> None:
    assert recipes.recipe("cps") == recipes.recipe("shapes/cps")
    assert recipes.recipe("wan") == recipes.recipe("wan/sage")
    with pytest.raises(ValueError, match="Did you mean 'flow_grpo'"):
        recipes.recipe("flow_gpro")
    with pytest.raises(ValueError, match="Did you mean 'hunyuan15/sage'"):
        recipes.recipe("hunyuan/sage")
