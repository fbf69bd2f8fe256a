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


QUICK = ("sage", "branch", "nft", "mix_grpo")
"""Methods of every kind: all steps, one shared step, none, a window."""


@pytest.mark.parametrize("method", QUICK)
def test_methods_run_on_a_real_architecture(method: str, make_config, make_trainer) -> None:
    config = make_config(
        kind="hunyuan15_t2v", rollout={"steps": 4}, batch=BatchConfig(prompts=1, group_size=4, micro_batch=4)
    )
    check_iteration(make_trainer(of_method(method, config)))


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


def test_sage_paper_states_the_papers_values() -> None:
    config = recipes.recipe("hunyuan15/sage_paper")
    assert (config.kernel.name, config.kernel.eta, config.kernel.sigma_max) == ("sage", 0.5, 0.997)
    region = config.trust_region
    assert (region.mode, region.beta_position, region.beta_velocity, config.anchor.every) == ("dual", 1.0, 0.1, 10)
    assert config.anchor.skip_below == 0.0  # its reference pass always runs
    ramp = config.kl
    assert (ramp.kind, ramp.lambda_min, ramp.lambda_max, ramp.warmup_updates) == ("two_stage", 1e-7, 1e-5, 100)
    assert (config.rollout.steps, config.rollout.window.kind, config.update.step_fraction) == (20, "all", 1.0)
    assert (config.surrogate.equalize, config.surrogate.equalize_cap, config.advantage.clip) == (True, None, 5.0)
    assert (config.batch.prompts, config.batch.group_size, config.optimizer.lr) == (16, 4, 1e-5)
    assert config.rewards[0].weights == {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}


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


@pytest.mark.parametrize("name", SAMPLE)
def test_a_recipe_with_its_own_number_of_steps_is_the_recipe(name: str) -> None:
    plain = recipes.recipe(name)
    assert recipes.recipe(name, plain.rollout.steps) == plain


@pytest.mark.parametrize(
    ("steps", "at", "weights", "around"),
    [
        (2, [0], [5], 1),
        (5, [1, 2, 3], [3, 1, 1], 1),
        (8, [2, 4, 5], [3, 1, 1], 2),
        (50, [16, 25, 33], [3, 1, 1], 16),
    ],
)
def test_long_runs_explore_later_steps_too_whatever_the_number_of_steps(
    steps: int, at: list[int], weights: list[int], around: int
) -> None:
    target = recipes.recipe("wan/sage")
    config = METHODS["branch_long"](replace(target, rollout=replace(target.rollout, steps=steps)))
    rollout = config.rollout
    assert (rollout.window.at, rollout.window.weights) == (at, weights)
    assert (rollout.before_steps, rollout.after_steps, rollout.solver) == (around, around, "ab2")
    assert (config.optimizer.lr, config.optimizer.decay) == (2 * target.optimizer.lr, "linear")
    planner = Planner(config, Schedule.shifted(steps, 3.0), config.kernel.build(), trains=lambda sigma: True)
    planner.check()
    plan = planner.plan(0, [Prompt(str(place)) for place in range(config.batch.prompts)])
    explored = [group.offset + group.trained[0][0] for group in plan.groups]
    assert set(explored) == set(at)
    assert 13 <= explored.count(at[0]) <= 24  # three of five, unless the steps are one
    assert all(group.schedule.num_steps == (around if at[0] else 0) + 1 + around for group in plan.groups)


def test_the_papers_reward_settings_have_names() -> None:
    """Table 2 of the paper: A weighs the three parts alike, B halves VQ and MQ; nothing else changes."""
    name = "hunyuan15/official"
    plain, a, b = recipes.recipe(name), recipes.recipe(f"{name}/a"), recipes.recipe(f"{name}/b")
    assert a.rewards[0].weights == {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
    assert b.rewards[0].weights == {"VQ": 0.5, "MQ": 0.5, "TA": 1.0} == plain.rewards[0].weights
    assert a.out == plain.out + "-a"
    undone = {"rewards": plain.rewards, "out": plain.out}
    assert replace(a, **undone) == plain == replace(b, **undone)


def test_recipe_shorthands_and_what_is_no_recipe() -> None:
    assert recipes.recipe("cps") == recipes.recipe("shapes/cps")
    assert recipes.recipe("wan") == recipes.recipe("wan/sage")
    assert recipes.recipe("hunyuan15/a") == recipes.recipe("hunyuan15/sage/a")
    for name, said in {
        "flow_gpro": "Did you mean 'flow_grpo'",
        "hunyuan15/offical": "Did you mean 'hunyuan15/official'",
        "shapes/sage/a": "settings A and B weigh VideoAlign, and this recipe's rewards are shapes",
        "hunyuan15/sage/c": "There is no recipe 'hunyuan15/sage/c'",
    }.items():
        with pytest.raises(ValueError, match=said):
            recipes.recipe(name)


def test_the_official_recipe_is_the_released_codes_run() -> None:
    """Values of its argparse and scripts, written out here so that a change of our defaults does not carry them along."""
    config = recipes.recipe("hunyuan15/official")
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == ("muon", 1e-5, 0.01)
    assert (config.optimizer.max_grad_norm, config.optimizer.warmup_updates, config.optimizer.decay) == (
        1,
        0,
        "constant",
    )
    assert (config.iterations, config.seed, config.batch.prompts, config.batch.group_size) == (10000, 42, 16, 4)
    assert (config.update.updates_per_rollout, config.update.step_fraction, config.update.permute_steps) == (1, 1, True)
    assert (config.rollout.steps, config.kernel.name, config.kernel.eta) == (20, "sage", 0.5)
    assert config.rollout.deterministic_last is None  # repaired: its noise would stay in the video
    assert (config.surrogate.clip_range, config.surrogate.equalize, config.advantage.clip) == (1e-4, True, 5.0)
    assert (config.kl.kind, config.kl.lambda_min, config.kl.lambda_max, config.kl.target) == ("paper", 1e-7, 1e-5, 1e-5)
    assert (config.kl.warmup_updates, config.kl.window) == (100, 10)
    assert (config.anchor.every, config.anchor.offload) == (10, True)
    region = config.trust_region
    assert (region.mode, region.beta_position, region.beta_velocity) == ("dual", 1.0, 0.1)
    assert (config.evaluate.every, config.evaluate.steps, config.keep.checkpoint_every) == (100, 40, 100)
    assert (config.model.dtype, config.model.lora, config.model.negative_prompt) == ("bfloat16", None, "")
    assert (config.model.height, config.model.width) == (352, 624)
    assert config.update.gradient_checkpointing == "auto"


def test_facts_that_stay_with_another_checkpoint_are_named() -> None:
    start = recipes.recipe("hunyuan15")
    assert not list(recipes.remarks(start, start))
    other = replace(start, model=replace(start.model, path="somebody/HunyuanVideo-1.5-720p"))
    (remark,) = recipes.remarks(other, start)
    assert "model.path is somebody/HunyuanVideo-1.5-720p" in remark
    assert "model.height 352, model.width 624 are still the recipe's" in remark
    assert "--model.height null --model.width null" in remark
    chosen = replace(other, model=replace(other.model, height=720, width=1280))
    assert not list(recipes.remarks(chosen, start))
    left = replace(other, model=replace(other.model, height=None, width=None))
    assert not list(recipes.remarks(left, start))


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_every_method_resumes_to_the_bit(method: str, make_config, make_trainer, tmp_path) -> None:
    config = of_method(method, make_config(rollout={"steps": 6}, iterations=4))
    assert_resumes_to_the_bit(make_trainer, config, tmp_path / "checkpoints")
