"""Clips that are trained: the best and the worst of a group, and clips that are dealt out to updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.data.groups import Member
from sage_grpo.flow.windows import Window
from sage_grpo.parallel.world import World
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, UpdateConfig
from sage_grpo.training.planner import choose
from sage_grpo.training.update import Item, accumulate
from trainer_helpers import plan_of

CPU = torch.device("cpu")
HALF = BatchConfig(prompts=2, group_size=4, micro_batch=1, trained_fraction=0.5)
CLIPS = UpdateConfig(updates_per_rollout=2, deal="clips")
SHARED = {"same_noise": True, "window": Window(kind="drawn", at=[1, 2])}


def rolled(trainer):
    """An iteration up to its advantages, and the plan with what is trained."""
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    scored = trainer.studio.score(trainer.studio.decode(rollout), plan)
    advantages = trainer.advantages(scored)
    return choose(trainer.config, plan, advantages, scored.valid), rollout, scored, advantages


def gradients(trainer, items) -> dict[str, torch.Tensor]:
    for parameter in trainer.state.params.values():
        parameter.grad = None
    accumulate(trainer.objective, items, CPU, kl_lambda=0.0)
    return {name: p.grad.clone() for name, p in trainer.state.params.items()}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=CLOSE, atol=1e-12)


@pytest.mark.usefixtures("in_double")
def test_the_gradient_is_that_of_the_chosen_clips_alone(make_config, make_trainer) -> None:
    """By hand: advantages of the whole group, the mean over the chosen clips; and the same in micro-batches of every size."""
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
            item = Item(record, replay.step, replay.step, advantages[[row]], weight, plan.equalizer[replay.step])
            by_hand.append(item)
    assert 0 < len(by_hand) == len(plan.replays(0, 0)) == len(plan.replayable(0, 0)) // 2
    expected = gradients(trainer, by_hand)
    close(gradients(trainer, trainer.items(plan, rollout, scored, advantages, 0)), expected)
    for size in (3, 8):
        other = make_trainer(replace(trainer.config, batch=replace(HALF, micro_batch=size)))
        whole = rolled(other)
        close(gradients(other, other.items(*whole, 0)), expected)


@pytest.mark.parametrize("rollout", [{}, SHARED])
@pytest.mark.parametrize("update", [UpdateConfig(updates_per_rollout=1), CLIPS])
@pytest.mark.usefixtures("in_double")
def test_ranks_together_do_what_one_does(rollout, update, make_config, make_trainer) -> None:
    """Two ranks with 5 and 4 clips, a group on both: as many passes on each, and their gradients add up."""
    batch = BatchConfig(prompts=3, group_size=3, micro_batch=2, trained_fraction=0.5)
    trainer = make_trainer(
        make_config(batch=batch, rollout=rollout, update=update, trust_region=TrustRegion(mode="none"))
    )
    plan, rollout, scored, advantages = rolled(trainer)
    alone = [trainer.items(plan, rollout, scored, advantages, number) for number in range(plan.updates)]
    expected = [gradients(trainer, items) for items in alone]
    trainer.planner = replace(trainer.planner, ranks=2)
    plan = choose(trainer.config, plan_of(trainer), advantages, scored.valid)
    parts = []
    for rank in (0, 1):
        trainer.world = trainer.studio.world = World(rank=rank, size=2)
        own = trainer.roll_out(replace(plan, chosen=None))
        parts.append([trainer.items(plan, own, scored, advantages, number) for number in range(plan.updates)])
    for number in range(plan.updates):
        assert len(parts[0][number]) == len(parts[1][number]) == plan.rounds[number]
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
        items = trainer.items(plan, rollout, scored, advantages, number)
        assert sum(float(item.weight.sum()) for item in items) == pytest.approx(1)
    other = choose(trainer.config, replace(plan, iteration=1, chosen=None), advantages, scored.valid)
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
