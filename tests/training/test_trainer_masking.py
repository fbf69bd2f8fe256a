"""A rollout whose reward failed is left out of everything; too many of them stop the run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from double import CLOSE
from sage_grpo.cli import main
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.advantage import group_advantage
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import AdvantageConfig, BatchConfig, UpdateConfig
from sage_grpo.training.update import Item, accumulate, with_anchor
from trainer_helpers import plan_of, same, weights_of

BAD = 5
ONE_BY_ONE = BatchConfig(prompts=2, group_size=4, micro_batch=1)


def reward(*bad: int) -> list[RewardSpec]:
    return [RewardSpec(name="trainer_toys:bright_but", options={"bad": list(bad)}, batch_size=0, try_out=False)]


def first_gradients(trainer) -> dict[str, torch.Tensor]:
    """Gradients of the first optimizer update, before clipping."""
    caught: dict[str, torch.Tensor] = {}
    apply = trainer._apply

    def watched(metrics: dict[str, float]) -> dict[str, float]:
        if not caught:
            caught.update({name: p.grad.clone() for name, p in trainer.state.params.items()})
        return apply(metrics)

    trainer._apply = watched
    trainer.step()
    return caught


def gradients_without(trainer, left_out: int) -> dict[str, torch.Tensor]:
    """By hand: the same rollout, in which one member never was."""
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    scored = trainer.studio.score(trainer.studio.decode(rollout), plan)
    keep = [place for place in range(8) if place != left_out]
    advantages = dict(zip(keep, group_advantage(scored.total[keep], scored.groups[keep], clip=5.0)))
    steps = len(plan.groups[0].trained[0])
    items = []
    for replay in plan.replays(0, 0):
        ((group, index),) = ((m.group, m.index) for m in replay.members)
        if (place := 4 * group + index) in advantages:
            items.append(
                Item(
                    rollout.records[replay], replay.step, replay.step, advantages[place][None],
                    torch.full((1,), 1 / 7 / steps), plan.equalizer[replay.step],
                )
            )  # fmt: skip
    device = torch.device("cpu")
    items = with_anchor(items, "pass", trainer.state.anchor, device)
    accumulate(trainer.objective, items, device, kl_lambda=trainer.state.kl.value)
    return {name: p.grad.clone() for name, p in trainer.state.params.items()}


@pytest.mark.usefixtures("in_double")
def test_gradients_are_those_of_a_rollout_without_the_failed_member(make_config, make_trainer) -> None:
    config = make_config(batch=ONE_BY_ONE)
    masked = first_gradients(make_trainer(replace(config, rewards=reward(BAD))))
    by_hand = gradients_without(make_trainer(config), BAD)
    whole = first_gradients(make_trainer(config))
    for name in masked:
        torch.testing.assert_close(masked[name], by_hand[name], rtol=CLOSE, atol=1e-12)
    assert not all(torch.allclose(masked[name], whole[name], rtol=1e-3) for name in masked)


@pytest.mark.parametrize("advantage", [AdvantageConfig(), AdvantageConfig(decoupled=True)])
@pytest.mark.usefixtures("in_double")
def test_other_groups_keep_their_advantages(advantage: AdvantageConfig, make_config, make_trainer) -> None:
    results = []
    for bad in ((), (BAD,)):
        trainer = make_trainer(make_config(rewards=reward(*bad), advantage=advantage))
        plan = plan_of(trainer)
        results.append(trainer.advantages(trainer.studio.score(trainer.studio.decode(trainer.roll_out(plan)), plan)))
    clean, masked = results
    if advantage.decoupled:  # its last step is a normalisation over the batch, which rescales every group alike
        clean, masked = clean / clean[0], masked / masked[0]
    torch.testing.assert_close(clean[:4], masked[:4], rtol=CLOSE, atol=0)  # the other prompt's group
    assert masked[BAD] == 0
    assert not torch.equal(clean[4:], masked[4:])
    assert masked[4:].sum() == pytest.approx(0, abs=CLOSE)


@pytest.mark.usefixtures("in_double")
def test_a_failed_sample_moves_the_policy_as_little_as_its_neighbours_in_a_micro_batch(
    make_config, make_trainer
) -> None:
    """Masking works the same whether the failed one sits in a micro-batch of one or of eight."""
    runs = []
    for micro_batch in (1, 8):
        batch = BatchConfig(prompts=2, group_size=4, micro_batch=micro_batch)
        runs.append(first_gradients(make_trainer(make_config(rewards=reward(BAD), batch=batch))))
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=CLOSE, atol=1e-12)


def test_a_group_without_any_reward_gives_nothing_and_no_nan(make_config, make_trainer) -> None:
    config = make_config(rewards=reward(4, 5, 6, 7), max_failed_fraction=0.5)
    metrics = make_trainer(config).step()
    assert metrics["reward/failed"] == 4
    assert all(math.isfinite(value) for value in metrics.values())


def test_rewards_without_spread_move_nothing_but_the_kl(make_config, make_trainer) -> None:
    config = make_config(rewards=[RewardSpec(name="trainer_toys:flat")])
    trainer = make_trainer(config)
    before = weights_of(trainer)
    metrics = trainer.step()
    assert metrics["gradient/norm"] == 0.0
    assert metrics["reward/group_std"] == 0.0
    assert same(before, weights_of(trainer))


def test_more_failures_than_allowed_stop_the_run_before_an_update(make_config, make_trainer) -> None:
    config = make_config(rewards=reward(1, 5), max_failed_fraction=0.25)
    assert make_trainer(config).step()["reward/failed"] == 2
    trainer = make_trainer(replace(config, rewards=reward(1, 2, 5)))
    before = weights_of(trainer)
    with pytest.raises(RewardFailure, match=r"3 of 8 clips.*0\.25"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert trainer.state.updates == trainer.state.iteration == 0


@pytest.mark.parametrize("allowed", [0.25, 1.0])
def test_a_reward_that_fails_for_everyone_stops_the_run(allowed: float, make_config, make_trainer) -> None:
    config = make_config(rewards=[RewardSpec(name="trainer_toys:broken", try_out=False)], max_failed_fraction=allowed)
    trainer = make_trainer(config)
    before = weights_of(trainer)
    with pytest.raises(RewardFailure, match="machine is gone"):
        trainer.step()
    assert same(before, weights_of(trainer))


def test_the_command_says_why_and_exits_with_1(make_config, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config()
    arguments = [
        "train", "--out", config.out, "--model.family", "trainer_zoo.toy", "--data.prompts", config.data.prompts,
        "--rewards", '[{"name": "trainer_toys:broken", "try_out": false}]', "--iterations", "2", "--rollout.steps", "3",
        "--batch.prompts", "2", "--log.tensorboard", "false",
    ]  # fmt: skip
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert "ConnectionError: the reward's machine is gone" in said.out + said.err
    assert not (Path(config.out) / "checkpoints").exists()


@pytest.mark.usefixtures("in_double")
def test_updates_see_the_mean_over_valid_rollouts_only(make_config, make_trainer) -> None:
    """Weights of the valid rollouts add up to 1 whatever failed.

    KL to an anchor that was moved by hand does not depend on rewards, so with member k left out its mean is (S - KL_k) / 7, and
    these means, averaged over all k, are S / 8: the mean of a rollout in which nobody failed.
    """
    region = TrustRegion(mode="fixed")

    def mean_kl(*bad: int) -> float:
        config = make_config(rewards=reward(*bad), update=UpdateConfig(updates_per_rollout=1), trust_region=region)
        trainer = make_trainer(config)
        for name, copy in trainer.state.anchor.copies.items():
            copy += 0.1 * keyed_noise(tuple(copy.shape), "moved", name)
        trainer.state.anchor.renewed_at = -1  # it is not the live policy any more
        trainer.step()
        return trainer.log[0]["kl/position"]

    left_out = [mean_kl(member) for member in range(8)]
    assert max(left_out) > 1.001 * min(left_out) > 0
    assert sum(left_out) / 8 == pytest.approx(mean_kl(), rel=CLOSE)
