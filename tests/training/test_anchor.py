"""What holds a policy back: the anchor and when its pass runs, the average that is evaluated, and the KL of a rollout's updates, which is
measured exactly, bounded, and steers the learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import AnchorConfig, BatchConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.kl_coefficient import KlCoefficient
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import Diverged
from sage_grpo.training.optim import SLACK
from sage_grpo.training.reference import ReferencePolicy, Snapshot
from sage_grpo.training.update import Updater, path_kl
from trainer_helpers import assert_resumes_to_the_bit, plan_of, resume, same, weights_of

FREE = TrustRegion(mode="none")
ONCE, TWICE = UpdateConfig(updates_per_rollout=1), UpdateConfig(updates_per_rollout=2)
STRONG = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=10.0)


@pytest.mark.parametrize(("mode", "every"), [("none", 0), ("stepwise", 0), ("fixed_dual", None), ("moving", 3)])
def test_an_anchor_is_where_a_mode_has_one_and_renewed_where_it_moves(mode, every, make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(trust_region=TrustRegion(mode=mode), anchor=AnchorConfig(every=3)))
    anchor, first = trainer.state.anchor, weights_of(trainer)
    assert (0 if anchor is None else anchor.every) == every
    if anchor is not None:
        trainer.step()
        trainer.step()  # four updates
        assert same(anchor.copies, first) == (every is None)
        assert not same(anchor.copies, weights_of(trainer))
        assert sum(log["anchor/renewed"] for log in trainer.log) == bool(every)


@pytest.mark.usefixtures("in_double")
def test_ema_follows_its_recursion_and_is_what_evaluation_sees(make_config, make_trainer) -> None:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, ema=0.75)
    trainer = make_trainer(make_config(optimizer=optimizer, update=ONCE))
    expected, ema = weights_of(trainer), trainer.state.ema
    for _ in range(3):
        trainer.step()
        expected = {name: 0.75 * expected[name] + 0.25 * p for name, p in weights_of(trainer).items()}
    assert all(torch.allclose(ema.copies[name], expected[name], rtol=0, atol=CLOSE) for name in expected)
    live = weights_of(trainer)
    averaged = trainer.evaluate().metrics
    assert same(weights_of(trainer), live)
    with ema.applied():
        trainer.state.ema = None
        assert trainer.evaluate().metrics == averaged


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    original = Updater.with_reference

    def counted(self, items, tick, *, needed):
        counts.extend([len(items)] * needed)
        return original(self, items, tick, needed=needed)

    monkeypatch.setattr(Updater, "with_reference", counted)
    return counts


def test_an_anchor_that_is_the_live_policy_takes_no_pass_and_changes_no_bit(
    make_config, make_trainer, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dual = TrustRegion(mode="dual")
    config = make_config(kl=STRONG, trust_region=dual, anchor=AnchorConfig(every=3), rollout={"steps": 4})
    trainer = make_trainer(config)
    for _ in range(4):
        trainer.step()
    assert len(passes) == 5
    monkeypatch.setattr(ReferencePolicy, "is_live", lambda self, updates, later=0: False)
    always = make_trainer(config)
    for _ in range(4):
        always.step()
    assert len(passes) == 5 + 8
    assert same(weights_of(trainer), weights_of(always))
    assert trainer.log == always.log


# The KL of updates --------------------------------------------------------------------------------------------------


def optimizer(**options) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.0, **options})


def measured(make_config, make_trainer, *, rollout=None, **fields):
    trainer = make_trainer(make_config(trust_region=FREE, rollout=rollout, **fields))
    plan, kept, roll_out = plan_of(trainer), {}, trainer.sample

    def noted(plan):
        kept["rollout"] = roll_out(plan)
        return kept["rollout"]

    trainer.sample = noted
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
    trainer, plan, rollout, before, row = measured(
        make_config,
        make_trainer,
        rollout={"steps": 5, **({"same_noise": True, "window": Window(kind="drawn", at=[2])} if branching else {})},
        update=ONCE if branching else TWICE,
        optimizer=optimizer(target_kl=1e-9),
        batch=BatchConfig(prompts=3, group_size=4, micro_batch=3),
    )
    expected = []
    with torch.no_grad():
        for group in plan.groups:
            steps = sorted(step for part in group.trained for step in part)
            squares = {step: float(trainer.engine.policy(group).transition(step).sensitivity) ** 2 for step in steps}
            assert group.kl_probe.step in steps
            for replay, record in rollout.records.items():
                names = [(member.group, member.index) for member in replay.members]
                if (group.index, 0) in names and replay.step == group.kl_probe.step:
                    place = names.index((group.index, 0)) * replay.rows // len(names)
                    weight = sum(squares.values()) / squares[replay.step]
                    expected.append(weight * nats(trainer, record, replay.step, place, before))
    assert len(expected) == len(plan.groups) == 3
    assert row["optimizer/kl"] == pytest.approx(sum(expected) / 3, rel=CLOSE)
    assert row["optimizer/kl"] > 0


@pytest.mark.parametrize(("limit", "seed"), [(1e-5, 0), (1e-3, 1)])
@pytest.mark.usefixtures("in_double")
def test_a_step_that_went_too_far_is_taken_back_to_the_limit(limit, seed, make_config, make_trainer) -> None:
    fields = {"seed": seed, "update": TWICE}
    trainer, plan, rollout, before, row = measured(
        make_config, make_trainer, optimizer=optimizer(lr=0.1, max_kl=limit), **fields
    )
    assert row["optimizer/kl"] > 4 * limit
    assert 96 * path_kl(Lockstep(plan), rollout, trainer.world, trainer.model.device) == pytest.approx(limit, rel=SLACK)
    free, *_, whole_row = measured(make_config, make_trainer, optimizer=optimizer(lr=0.1, max_kl=1e9), **fields)
    assert whole_row["optimizer/kept"] == 1.0
    assert whole_row["optimizer/kl"] == row["optimizer/kl"]
    whole = weights_of(free)
    for name, now in weights_of(trainer).items():
        moved = before[name] + row["optimizer/kept"] * (whole[name] - before[name])
        torch.testing.assert_close(now, moved, rtol=CLOSE, atol=CLOSE)


def test_anchor_and_average_see_what_is_left_of_a_step(make_config, make_trainer) -> None:
    config = make_config(
        trust_region=TrustRegion(mode="moving"),
        anchor=AnchorConfig(every=1),
        update=ONCE,
        optimizer=optimizer(max_kl=1e-5, ema=0.0),
    )
    trainer = make_trainer(config)
    assert trainer.step()["optimizer/kept"] < 0.5
    assert same(trainer.state.anchor.copies, weights_of(trainer))
    assert same(trainer.state.ema.copies, weights_of(trainer))


def test_a_policy_that_is_no_number_any_more_stops_the_run(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(trust_region=FREE, update=ONCE, optimizer=optimizer(target_kl=0.1)))
    apply = trainer.updater.apply

    def broken(metrics):
        result = apply(metrics)
        next(iter(trainer.state.params.values())).data.fill_(torch.nan)
        return result

    trainer.updater.apply = broken
    with pytest.raises(Diverged, match="velocities are not finite"):
        trainer.step()


def test_a_run_with_a_trust_region_that_acts_resumes_to_the_bit(make_config, make_trainer, tmp_path) -> None:
    config = make_config(
        iterations=4,
        trust_region=TrustRegion(mode="dual"),
        kl=KlCoefficient(kind="share", share=0.3),
        optimizer=optimizer(target_kl=1e-4, max_kl=2e-3),
    )
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
    trainer.updater.config = replace(trainer.config.optimizer, max_kl=1e-14)
    assert trainer.step()["optimizer/kept"] < 1e-4
    moved = sum(float((now - second[name]).abs().max()) for name, now in weights_of(trainer).items())
    assert moved < 1e-3 * sum(float((first[name] - second[name]).abs().max()) for name in first)
