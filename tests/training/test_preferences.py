"""Clips that are chosen: dpo and sft on clips of a rollout send the gradient of the formulas, whatever lies in which micro-batch; the best
and the worst of a group, and clips that are dealt out to updates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.data.groups import Member
from sage_grpo.distributed.world import World
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.samplers.windows import Window
from sage_grpo.training import update as updates
from sage_grpo.training.config import BatchConfig, UpdateConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import TrainItem
from sage_grpo.training.rollout import NoiseKeys
from sage_grpo.training.trainer import Trainer
from trainer_helpers import assert_alike, plan_of, watch_gradients, weights_of

PROMPTS, SIZE, LEVELS, BETA = 2, 3, 2, 50.0


@pytest.fixture
def small(make_config):
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
    return assemble(config, build(config))


def oracle(trainer: Trainer, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The next iteration's gradient by the formulas, with whole pairs in one graph; `start` has the weights of the reference."""
    model, config, number = trainer.model, trainer.config, trainer.state.iteration
    plan = trainer.planner.plan(number, trainer.state.stream.peek(PROMPTS))
    rollout = trainer.sample(plan)
    scored = trainer.score(rollout, plan)
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
    gradients = torch.autograd.grad(
        trainer.objective.scale(trainer.dims) * mean, list(params.values()), allow_unused=True
    )
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
        patch.setattr(updates.Updater, "_replayed", lambda *given: passes.append(given) or [])
        row = trainer.step()
    assert not passes
    assert row["loss/policy"] == pytest.approx(math.log(2), rel=1e-6)
    assert row["preference/lead"] == row["preference/accuracy"] == 0.0  # a tie is no win


def test_groups_whose_rewards_do_not_differ_are_skipped_and_counted(monkeypatch, small) -> None:
    config = small("dpo")
    trainer = made(config)
    original = trainer.score

    def score(rollout, plan):
        scored = original(rollout, plan)
        return replace(scored, total=torch.where(scored.groups == 0, 0.5, scored.total))

    monkeypatch.setattr(trainer, "score", score)
    row = trainer.step()
    assert row["preference/skipped"] == 1.0
    assert {best.group for best, _ in trainer.plan.pairs} == {1}
    monkeypatch.setattr(trainer, "score", lambda *given: replace(score(*given), total=torch.zeros(PROMPTS * SIZE)))
    row = trainer.step()
    assert (row["preference/skipped"], row["loss/policy"]) == (2.0, 0.0)


def test_pairs_stay_together_where_clips_are_dealt_to_updates(small) -> None:
    config = small("dpo")
    config = replace(
        config,
        batch=replace(config.batch, prompts=4, group_size=4, trained_fraction=1.0),
        update=replace(config.update, updates_per_rollout=2, deal="clips"),
    )
    trainer = made(config)
    plan = trainer.planner.foresee(trainer.planner.plan(0, trainer.state.stream.peek(4)))
    assert len(plan.pairs) == 8
    for better, worse in plan.pairs:
        assert [better in part for part in plan.chosen] == [worse in part for part in plan.chosen]
        assert sum(better in part for part in plan.chosen) == 1
    assert replace(plan, chosen=(frozenset({Member(0, 0)}), frozenset({Member(2, 1)}))).skipped == 2


HALF = BatchConfig(prompts=2, group_size=4, micro_batch=1, trained_fraction=0.5)
CLIPS = UpdateConfig(updates_per_rollout=2, deal="clips")
SHARED = {"same_noise": True, "window": Window(kind="drawn", at=[1, 2])}


def rolled(trainer):
    plan = plan_of(trainer)
    rollout = trainer.sample(plan)
    scored = trainer.engine.gather(trainer.engine.score(trainer.engine.decode(rollout), plan))
    advantages = trainer.advantages(scored, plan)
    return trainer.planner.choose(plan, advantages, scored.valid), rollout, scored, advantages


def items_of(trainer, rolled: tuple, update: int) -> list:
    plan, *rest = rolled
    return trainer.updater.items(Lockstep(plan), *rest, update)


def gradients(trainer, items) -> dict[str, torch.Tensor]:
    for parameter in trainer.state.params.values():
        parameter.grad = None
    trainer.updater.accumulate(items, 0.0)
    return {name: p.grad.clone() for name, p in trainer.state.params.items()}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=CLOSE, atol=1e-12)


@pytest.mark.usefixtures("in_double")
def test_the_gradient_is_that_of_the_chosen_clips_alone(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(batch=HALF, trust_region=TrustRegion(mode="none")))
    plan, rollout, scored, advantages = rolled(trainer)
    order = [sorted(range(4 * g, 4 * g + 4), key=lambda row: float(scored.total[row])) for g in (0, 1)]
    kept = {row for rows in order for row in (rows[0], rows[-1])}
    steps = len(plan.groups[0].trained[0])
    by_hand = []
    for replay in plan.replayable(0, 0):
        row = 4 * replay.members[0].group + replay.members[0].index
        if row in kept:
            record, weight = rollout.records[replay], torch.full((1,), 1 / 4 / steps)
            item = TrainItem(record, replay.step, replay.step, advantages[[row]], weight, plan.equalizer[replay.step])
            by_hand.append(item)
    assert 0 < len(by_hand) == len(plan.replays(0, 0)) == len(plan.replayable(0, 0)) // 2
    expected = gradients(trainer, by_hand)
    close(gradients(trainer, trainer.updater.items(Lockstep(plan), rollout, scored, advantages, 0)), expected)
    other = make_trainer(replace(trainer.config, batch=replace(HALF, micro_batch=3)))
    close(gradients(other, items_of(other, rolled(other), 0)), expected)


@pytest.mark.parametrize(
    ("rollout", "update"), [({}, CLIPS), (SHARED, UpdateConfig(updates_per_rollout=1)), (SHARED, CLIPS)]
)
@pytest.mark.usefixtures("in_double")
def test_ranks_together_do_what_one_does(rollout, update, make_config, make_trainer) -> None:
    batch = BatchConfig(prompts=3, group_size=3, micro_batch=2, trained_fraction=0.5)
    trainer = make_trainer(
        make_config(batch=batch, rollout=rollout, update=update, trust_region=TrustRegion(mode="none"))
    )
    plan, rollout, scored, advantages = rolled(trainer)
    alone = [
        trainer.updater.items(Lockstep(plan), rollout, scored, advantages, number) for number in range(plan.updates)
    ]
    expected = [gradients(trainer, items) for items in alone]
    trainer.planner = replace(trainer.planner, ranks=2)
    plan = trainer.planner.choose(plan_of(trainer), advantages, scored.valid)
    parts = []
    for rank in (0, 1):
        trainer.world = trainer.engine.world = trainer.updater.world = World(rank=rank, size=2)
        own = trainer.sample(replace(plan, chosen=None))
        parts.append(
            [trainer.updater.items(Lockstep(plan), own, scored, advantages, number) for number in range(plan.updates)]
        )
    for number in range(plan.updates):
        assert len(parts[0][number]) == len(parts[1][number])
        sums = [gradients(trainer, part[number]) for part in parts]
        close({name: sums[0][name] + sums[1][name] for name in sums[0]}, expected[number])


def test_clips_are_dealt_out_once_with_all_their_steps(make_config, make_trainer) -> None:
    batch = BatchConfig(prompts=3, group_size=3, micro_batch=1)
    trainer = make_trainer(make_config(batch=batch, update=CLIPS))
    plan, rollout, scored, advantages = rolled(trainer)
    everybody = {Member(group, index) for group in range(3) for index in range(3)}
    first, second = plan.chosen
    assert first | second == everybody
    assert not first & second
    assert {len(first), len(second)} == {4, 5}
    assert all({m.group for m in part} == {0, 1, 2} for part in plan.chosen)  # every update sees every group
    assert len(set(plan.groups[0].trained)) == 1
    for number in (0, 1):
        items = trainer.updater.items(Lockstep(plan), rollout, scored, advantages, number)
        assert sum(float(item.weight.sum()) for item in items) == pytest.approx(1)
    other = trainer.planner.choose(replace(plan, iteration=1, chosen=None), advantages, scored.valid)
    assert other.chosen != plan.chosen
    assert trainer.step()["ratio/first_log"] == 0.0


def test_failed_clips_are_not_trained(make_config, make_trainer) -> None:
    bad = RewardSpec(name="trainer_toys:bright_but", options={"bad": [0, 5, 6]}, batch_size=0, try_out=False)
    trainer = make_trainer(make_config(rewards=[bad], batch=HALF, max_failed_fraction=0.5, update=CLIPS))
    plan, *_ = rolled(trainer)
    chosen = plan.chosen[0] | plan.chosen[1]
    assert not chosen & {Member(0, 0), Member(1, 1), Member(1, 2)}
    assert {m for m in chosen if m.group == 1} == {Member(1, 0), Member(1, 3)}
    assert len(chosen) == 4
