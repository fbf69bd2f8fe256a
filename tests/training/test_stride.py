"""A trust region that acts: the KL of a rollout's updates is measured exactly, bounded, and steers the learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.flow.windows import Window
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.pace import SLACK
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.anchor import Snapshot
from sage_grpo.training.config import AnchorConfig, BatchConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.update import Diverged, path_kl
from trainer_helpers import assert_resumes_to_the_bit, resume, same, weights_of

FREE = TrustRegion(mode="none")
BRANCH = {"steps": 5, "same_noise": True, "window": Window(kind="drawn", at=[2])}


def optimizer(**options) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.0, **options})


def measured(make_config, make_trainer, *, rollout=None, **fields):
    """One iteration of a trainer, with its plan and rollout."""
    trainer = make_trainer(make_config(trust_region=FREE, rollout=rollout, **fields))
    plan = trainer.planner.plan(0, trainer.state.stream.peek(trainer.config.batch.prompts))
    kept = {}
    roll_out = trainer.roll_out

    def noted(plan):
        kept["rollout"] = roll_out(plan)
        return kept["rollout"]

    trainer.roll_out = noted
    before = weights_of(trainer)
    row = trainer.step()
    return trainer, plan, kept["rollout"], before, row


def nats(trainer, record, step, row, before) -> float:
    """KL(old, new) of one step of one member from the two Gaussians themselves: means and std."""
    new = record.policy.step(step, record.x, record.conditions).gaussian
    snapshot = Snapshot(trainer.state.params)
    for name, value in before.items():
        snapshot.copies[name].copy_(value)
    with snapshot.applied():
        old = record.policy.step(step, record.x, record.conditions).gaussian
    return float(((new.mean[row] - old.mean[row]) / old.std).double().square().sum() / 2)


@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.usefixtures("in_double")
def test_the_kl_of_an_update_is_that_of_its_gaussians(branching: bool, make_config, make_trainer) -> None:
    """In nats, summed over dimensions; mean over groups, which stand for all their trained steps."""
    update = UpdateConfig(updates_per_rollout=1 if branching else 2)
    trainer, plan, rollout, before, row = measured(
        make_config, make_trainer, rollout=BRANCH if branching else {"steps": 5}, update=update,
        optimizer=optimizer(target_kl=1e-9), batch=BatchConfig(prompts=3, group_size=4, micro_batch=3),
    )  # fmt: skip
    expected = []
    with torch.no_grad():
        for group in plan.groups:
            steps = sorted(step for part in group.trained for step in part)
            squares = {step: float(trainer.studio.policy(group).transition(step).sensitivity) ** 2 for step in steps}
            assert group.gauge.step in steps
            for replay, record in rollout.records.items():
                places = [
                    p for p, member in enumerate(replay.members) if (member.group, member.index) == (group.index, 0)
                ]
                if places and replay.step == group.gauge.step:
                    weight = sum(squares.values()) / squares[replay.step]
                    expected.append(
                        weight
                        * nats(trainer, record, replay.step, places[0] * replay.rows // len(replay.members), before)
                    )
    assert len(expected) == len(plan.groups) == 3
    assert row["optimizer/kl"] == pytest.approx(sum(expected) / 3, rel=CLOSE)
    assert row["optimizer/kl"] > 0


@pytest.mark.parametrize(("limit", "seed"), [(1e-5, 0), (1e-5, 2), (1e-3, 1)])
@pytest.mark.usefixtures("in_double")
def test_a_step_that_went_too_far_is_taken_back_to_the_limit(limit, seed, make_config, make_trainer) -> None:
    """All of its updates together, and measured again it has the KL that it may have, also where that is far from the step's square."""
    fields = {"seed": seed, "update": UpdateConfig(updates_per_rollout=2)}
    trainer, plan, rollout, before, row = measured(
        make_config, make_trainer, optimizer=optimizer(lr=0.1, max_kl=limit), **fields
    )
    assert row["optimizer/kl"] > 4 * limit
    assert 96 * path_kl(plan, rollout, trainer.world, trainer.model.device) == pytest.approx(limit, rel=SLACK)
    free, *_, whole_row = measured(make_config, make_trainer, optimizer=optimizer(lr=0.1, max_kl=1e9), **fields)
    assert whole_row["optimizer/kept"] == 1.0
    assert whole_row["optimizer/kl"] == row["optimizer/kl"]
    whole = weights_of(free)
    for name, now in weights_of(trainer).items():
        moved = before[name] + row["optimizer/kept"] * (whole[name] - before[name])
        torch.testing.assert_close(now, moved, rtol=CLOSE, atol=CLOSE)


def test_anchor_and_average_see_what_is_left_of_a_step(make_config, make_trainer) -> None:
    config = make_config(
        trust_region=TrustRegion(mode="moving"), anchor=AnchorConfig(every=1), update=UpdateConfig(updates_per_rollout=1),
        optimizer=optimizer(max_kl=1e-5, ema=0.0),
    )  # fmt: skip
    trainer = make_trainer(config)
    assert trainer.step()["optimizer/kept"] < 0.5
    assert same(trainer.state.anchor.copies, weights_of(trainer))
    assert same(trainer.state.ema.copies, weights_of(trainer))


def test_a_policy_that_is_no_number_any_more_stops_the_run(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(trust_region=FREE, optimizer=optimizer(target_kl=0.1)))
    apply = trainer._apply

    def broken(metrics):
        result = apply(metrics)
        next(iter(trainer.state.params.values())).data.fill_(torch.nan)
        return result

    trainer._apply = broken
    trainer.planner = replace(
        trainer.planner, config=replace(trainer.config, update=UpdateConfig(updates_per_rollout=1))
    )
    with pytest.raises(Diverged, match="velocities are not finite"):
        trainer.step()


@pytest.mark.parametrize("region", ["fixed", "dual"])
def test_a_run_with_a_trust_region_that_acts_resumes_to_the_bit(region, make_config, make_trainer, tmp_path) -> None:
    config = make_config(
        iterations=4, trust_region=TrustRegion(mode=region), kl=KlCoefficient(kind="share", share=0.3),
        optimizer=optimizer(target_kl=1e-4, max_kl=2e-3),
    )  # fmt: skip
    assert_resumes_to_the_bit(make_trainer, config, tmp_path / "checkpoints")
    trainer = make_trainer(config)
    resume(trainer, tmp_path / "checkpoints")
    assert trainer.state.optimizer.pace.factor < 0.9  # else the test could not fail
    assert trainer.state.kl.value > 1.1


def test_a_step_is_taken_back_to_where_it_began(make_config, make_trainer) -> None:
    """Not to the weights of an earlier iteration: with nearly nothing kept, the weights stay where they are."""
    trainer = make_trainer(make_config(trust_region=FREE, optimizer=optimizer(max_kl=1e9)))
    first = weights_of(trainer)
    trainer.step()
    second = weights_of(trainer)
    strict = replace(trainer.config.optimizer, max_kl=1e-14)
    trainer.config = replace(trainer.config, optimizer=strict)
    assert trainer.step()["optimizer/kept"] < 1e-4
    moved = sum(float((now - second[name]).abs().max()) for name, now in weights_of(trainer).items())
    assert moved < 1e-3 * sum(float((first[name] - second[name]).abs().max()) for name in first)
