"""What `sage-grpo plan` says of the network's passes is what the network does, counted during real iterations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from trainer_helpers import plan_of

from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.train.config import BatchConfig, DataConfig, EvalConfig, OptimizerConfig
from sage_grpo.train.forecast.costs import forecast
from sage_grpo.train.forecast.hardware import find
from sage_grpo.train.forecast.passes import PHASES, evaluations

GUIDED = ModelSpec(family="trainer_zoo.guided", guidance_scale=4.0)


def counted(trainer, *, evaluate: bool = False) -> dict[str, Counter]:
    """Forward passes and clips of one iteration, by what the trainer was doing."""
    result, phase = {}, ["other"]

    def note(module, arguments, named):
        x = named.get("hidden_states", arguments[0] if arguments else None)
        kind = phase[0] if not torch.is_grad_enabled() or phase[0] == "other" else "replay"
        result.setdefault(kind, Counter()).update({"forwards": 1, "clips": len(x)})

    def during(name, function):
        def call(*arguments, **named):
            phase[0] = name
            try:
                return function(*arguments, **named)
            finally:
                phase[0] = "other"

        return call

    networks = (trainer.model.network, *trainer.model.others)
    handles = [network.register_forward_pre_hook(note, with_kwargs=True) for network in networks]
    trainer.roll_out = during("rollout", trainer.roll_out)
    trainer.update = during("reference", trainer.update)
    trainer.evaluate = during("evaluation", trainer.evaluate)
    trainer.step()
    if evaluate:
        trainer.evaluate()
    for handle in handles:
        handle.remove()
    return result


def check(config, trainer, *, rank: int = 0, ranks: int = 1, evaluate: bool = False) -> None:
    said = forecast(config, find("cpu"), gpus=ranks, held_out=len(trainer.held_out))
    row, seen = said.passes[rank], counted(trainer, evaluate=evaluate)
    sampled = row["shared"] + row["sampling"] + row["idle"]
    expected = {"rollout": sampled, "reference": row["reference"] + row["gauge"], "replay": row["replay"]}
    if evaluate:
        expected["evaluation"] = said.evaluation[rank]
    assert set(row) == set(PHASES)
    assert set(seen) <= set(expected)  # every pass happened in a phase that the plan knows
    for name, passes in expected.items():
        assert seen.get(name, Counter())["clips"] == passes.clips, name
        assert seen.get(name, Counter())["forwards"] == passes.forwards, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe(target, method, make_config, make_trainer) -> None:
    """Every target with every method: fewer prompts and steps, on a model whose pass takes a tenth of a millisecond."""
    base, small = TARGETS[target](), make_config()
    base = replace(base, iterations=8, rollout=replace(base.rollout, steps=6), batch=replace(base.batch, prompts=2))
    config = replace(
        METHODS[method](base),
        model=replace(GUIDED, guidance_scale=1.0 if target == "shapes" else 4.0),
        rewards=small.rewards,
        data=small.data,
        evaluate=replace(base.evaluate, prompts=3, per_prompt=2, steps=2),
    )
    check(config, make_trainer(config), evaluate=True)


@pytest.mark.parametrize(
    ("kind", "method"),
    [("hunyuan15_t2v", "sage"), ("wan_t2v", "branch"), ("wan22_t2v", "sage"), ("wan22_t2v", "branch")],
)
def test_real_architectures_from_their_config_files(kind, method, make_config, make_trainer) -> None:
    """Guidance, experts and grid are read from the folder; wan22 has two networks."""
    model = {"guidance_scale": None, "guidance_scale_2": 1.0 if "wan22" in kind else None}
    batch = BatchConfig(prompts=2, group_size=4, micro_batch=2)  # one prompt in each: texts differ in length
    config = make_config(kind=kind, model=model, rollout={"steps": 5}, batch=batch)
    config = METHODS[method](replace(config, evaluate=EvalConfig(every=0, prompts=2, per_prompt=2, steps=2)))
    check(config, make_trainer(config), evaluate=True)


@pytest.mark.parametrize("mode", ["none", "fixed", "stepwise", "moving", "dual"])
@pytest.mark.parametrize("in_training", [True, False])
def test_anchors_and_guidance(mode, in_training, make_config, make_trainer) -> None:
    model = replace(GUIDED, guidance_in_training=in_training)
    config = make_config(trust_region=TrustRegion(mode=mode), batch=BatchConfig(prompts=3, group_size=3, micro_batch=2))
    config = replace(config, model=model)
    said = forecast(config, find("h200")).passes[0]
    assert (said["reference"].clips > 0) == (mode in ("fixed", "moving", "dual"))
    assert said["replay"].forwards == said["replay"].velocities * (2 if in_training else 1)
    check(config, make_trainer(config), evaluate=True)


@pytest.mark.parametrize("share", [True, False])
def test_measuring_the_step(share, make_config, make_trainer) -> None:
    config = make_config(optimizer=OptimizerConfig(target_kl=0.1), rollout={"steps": 5, "same_noise": share})
    config = replace(config, model=GUIDED, batch=BatchConfig(prompts=3, group_size=3, micro_batch=2))
    said = forecast(config, find("h200")).passes[0]
    assert said["gauge"].velocities > 0
    check(config, make_trainer(config))


@pytest.mark.parametrize("old_decay", [0.0, 0.5])
def test_the_old_policys_passes(old_decay, make_config, make_trainer) -> None:
    """Of every update but the first, or of all where the old policy lags; beside the anchor's."""
    config = METHODS["nft"](make_config(batch=BatchConfig(prompts=3, group_size=3, micro_batch=2)))
    objective = replace(config.objective, old_decay=old_decay)
    config = replace(config, model=GUIDED, objective=objective, trust_region=TrustRegion(mode="fixed"))
    said = forecast(config, find("h200")).passes[0]
    old = said["replay"].clips // (1 if old_decay else 2)
    assert said["reference"].clips == old + said["replay"].clips // 2  # the fixed anchor is live in the first update
    check(config, make_trainer(config))


def test_small_clips_are_guided_in_one_batch(checkpoint) -> None:
    """On CUDA: as many clips, half as many passes."""
    config = replace(recipe("shapes/sage"), model=ModelSpec(path=str(checkpoint("hunyuan15_t2v")), guidance_scale=2.0))
    config = replace(config, batch=BatchConfig(prompts=2, group_size=4, micro_batch=4))
    gpu, cpu = (forecast(config, find(name)).passes[0] for name in ("h200", "cpu"))
    for phase in PHASES:
        assert gpu[phase].clips == cpu[phase].clips
        assert 2 * gpu[phase].forwards == cpu[phase].forwards


def test_the_plan_is_the_one_that_training_executes(make_config, make_trainer) -> None:
    """Windows that move: later iterations too."""
    config = METHODS["mix_grpo"](make_config(model={"shift": 3.0}, rollout={"steps": 8}, iterations=8))
    trainer, said = make_trainer(config), forecast(config, find("h200"))
    assert len(said.plans) == 8
    assert len({sum(one.rows for one in plan.sampled(0)) for plan in said.plans}) > 1
    for iteration, plan in enumerate(said.plans):
        mine = plan_of(trainer, iteration)
        assert [group.trained for group in plan.groups] == [group.trained for group in mine.groups]
        assert list(plan.sampled(0)) == list(mine.sampled(0))


@pytest.mark.parametrize(("every", "iterations", "number"), [(0, 7, 2), (3, 7, 4), (3, 6, 3), (20, 7, 2), (1, 3, 4)])
def test_evaluations_of_a_run(every, iterations, number, make_config) -> None:
    config = make_config(evaluate=EvalConfig(every=every, prompts=2), iterations=iterations)
    due = [n for n in range(iterations + 1) if n in (0, iterations) or (every and n % every == 0)]
    assert evaluations(config) == number == len(due)
    assert evaluations(replace(config, data=DataConfig(prompts=config.data.prompts))) == 0
