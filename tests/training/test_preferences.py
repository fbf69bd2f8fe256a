"""dpo and sft on clips of a rollout: what is sent to the weights is the gradient of the formulas, whatever lies in which micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sage_grpo.data.groups import Member
from sage_grpo.recipes.methods import METHODS
from sage_grpo.training import trainer as line
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.planner import foresee
from sage_grpo.training.rollout import NoiseKeys
from sage_grpo.training.trainer import Trainer
from trainer_helpers import assert_alike, watch_gradients, weights_of

PROMPTS, SIZE, LEVELS, BETA = 2, 3, 2, 50.0


@pytest.fixture
def small(make_config):
    """Makes the configuration of a few clips, whose reward is brightness."""

    def make(method: str, **objective):
        base = make_config(batch=BatchConfig(prompts=PROMPTS, group_size=SIZE, micro_batch=2), rollout={"steps": 4})
        config = METHODS[method](base)
        return replace(
            config,
            batch=replace(config.batch, trained_fraction=0.4),
            objective=replace(config.objective, levels=LEVELS, draw="schedule", beta=BETA, **objective),
            optimizer=replace(config.optimizer, max_grad_norm=1e9),
        )

    return make


def made(config) -> Trainer:
    return Trainer(config, build(config))


def oracle(trainer: Trainer, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The next iteration's gradient by the formulas, with whole pairs in one graph; `start` has the weights of the reference."""
    model, config, number = trainer.model, trainer.config, trainer.state.iteration
    plan = trainer.planner.plan(number, trainer.state.stream.peek(PROMPTS))
    rollout = trainer.roll_out(plan)
    scored = trainer.score(trainer.judge(rollout, plan))
    clips = {member: row for batch, rows in rollout.latents for member, row in zip(batch.members, rows)}
    params, keys = trainer.state.params, NoiseKeys(config.seed, number)
    noised = []
    for group in plan.groups:
        (condition,) = model.encode([group.prompt.text])
        own = scored.total[group.index * SIZE : (group.index + 1) * SIZE]
        best, worst = int(own.argmax()), int(own.argmin())
        drawn = Member(group.index, 0 if config.objective.kind == "dpo" else best)  # a pair shares its noise
        for level in range(LEVELS):
            sigma, eps = group.levels.schedule.sigmas[level], keys.fresh([drawn], level, model.latent_shape())
            for member in (best, worst):
                x0 = clips[Member(group.index, member)][None]
                noised.append(((1 - sigma) * x0 + sigma * eps, sigma, [condition], eps - x0))

    def errors() -> list[torch.Tensor]:
        return [(model.velocity(x, sigma, condition) - u).square().mean() for x, sigma, condition, u in noised]

    now = weights_of(trainer)
    with torch.no_grad():
        load(params, start)
        reference = errors()
        load(params, now)
    live = errors()
    gaps = [error - other for error, other in zip(live, reference)]
    leads = [-BETA / 2 * (win - lose) for win, lose in zip(gaps[::2], gaps[1::2])]
    losses = [-torch.nn.functional.logsigmoid(lead) for lead in leads]
    mean = torch.stack(losses if config.objective.kind == "dpo" else live[::2]).mean()
    gradients = torch.autograd.grad(trainer.objective.scale * mean, list(params.values()), allow_unused=True)
    return {name: one for name, one in zip(params, gradients) if one is not None}


def load(params: dict, weights: dict) -> None:
    for name, p in params.items():
        p.copy_(weights[name])


@pytest.mark.parametrize("method", ["dpo", "rft"])
def test_gradients_are_those_of_the_formulas_at_the_start_and_after_it(method: str, small) -> None:
    trainer = made(small(method))
    start = weights_of(trainer)
    for _ in range(2):  # at the reference, and away from it, where a clip needs its rival's error
        wanted, found = oracle(trainer, start), watch_gradients(trainer)
        trainer.step()
        assert_alike(found[0], wanted, 1e-4)


def test_the_first_loss_is_log_2_and_needs_no_reference(small) -> None:
    trainer = made(small("dpo"))
    passes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line, "with_rivals", lambda objective, items, need, *rest: passes.append(need) or items)
        row = trainer.step()
    assert passes == ["live"]
    assert row["loss/policy"] == pytest.approx(math.log(2), rel=1e-6)
    assert row["preference/lead"] == row["preference/accuracy"] == 0.0  # a tie is no win


def test_groups_whose_rewards_do_not_differ_are_skipped_and_counted(monkeypatch, small) -> None:
    config = small("dpo")
    trainer = made(config)
    original = trainer.score

    def score(judged):
        scored = original(judged)
        return replace(scored, total=torch.where(scored.groups == 0, 0.5, scored.total))

    monkeypatch.setattr(trainer, "score", score)
    row = trainer.step()
    assert row["preference/skipped"] == 1.0
    assert {best.group for best, _ in trainer.done.pairs} == {1}
    monkeypatch.setattr(trainer, "score", lambda judged: replace(score(judged), total=torch.zeros(PROMPTS * SIZE)))
    row = trainer.step()
    assert (row["preference/skipped"], row["loss/policy"]) == (2.0, 0.0)


def test_pairs_stay_together_where_clips_are_dealt_to_updates(small) -> None:
    config = small("dpo")
    config = replace(
        config,
        batch=replace(config.batch, prompts=4, group_size=4, trained_fraction=1.0),
        update=replace(config.update, updates_per_rollout=2, deal="clips"),
    )
    plan = made(config).planner.plan(0, made(config).state.stream.peek(4))
    plan = foresee(config, plan)
    assert len(plan.pairs) == 8
    for better, worse in plan.pairs:
        assert [better in part for part in plan.chosen] == [worse in part for part in plan.chosen]
        assert sum(better in part for part in plan.chosen) == 1
    assert replace(plan, chosen=(frozenset({Member(0, 0)}), frozenset({Member(2, 1)}))).skipped == 2
