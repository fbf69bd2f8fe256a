"""A rollout whose reward failed is left out of everything, too many stop the run, and so does a loss that is not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, UpdateConfig
from sage_grpo.training.update import Diverged
from trainer_helpers import same, weights_of

BAD = 5
ONE_BY_ONE = BatchConfig(prompts=2, group_size=4, micro_batch=1)


def reward(*bad: int) -> list[RewardSpec]:
    return [RewardSpec(name="trainer_toys:bright_but", options={"bad": list(bad)}, batch_size=0, try_out=False)]


def test_more_failures_than_allowed_stop_the_run_before_an_update(make_config, make_trainer) -> None:
    config = make_config(rewards=reward(1, 5), max_failed_fraction=0.25)
    assert make_trainer(config).step()["reward/failed"] == 2
    trainer = make_trainer(replace(config, rewards=reward(1, 2, 5)))
    before = weights_of(trainer)
    with pytest.raises(RewardFailure, match=r"3 of 8 clips.*0\.25"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert trainer.state.updates == trainer.state.iteration == 0


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


def poison(trainer, step: int, value: float) -> None:
    """From the first replay on, the velocity at one denoising step is spoilt; the rollout was fine."""
    velocity, (sigma, _) = trainer.model.velocity, trainer.planner.grid.pair(step)

    def spoilt(x, at, conditions, *, guidance=None):
        v = velocity(x, at, conditions, guidance=guidance)
        return v * value if torch.is_grad_enabled() and float(at) == float(sigma) else v

    trainer.model.velocity = spoilt


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_denoising_step(value: float, make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(update=UpdateConfig(updates_per_rollout=1, permute_steps=False)))
    poison(trainer, 2, value)
    before = weights_of(trainer)
    with pytest.raises(Diverged, match=r"denoising step\(s\) \[2\].*not changed"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert trainer.state.updates == 0
    assert not trainer.state.optimizer.tensors()


def test_a_gradient_that_breaks_inside_the_network_names_its_update(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(update=UpdateConfig(updates_per_rollout=2)))
    trainer.step()
    before = weights_of(trainer)
    state = {name: tensor.clone() for name, tensor in trainer.state.optimizer.tensors().items()}
    anchor = {name: copy.clone() for name, copy in trainer.state.anchor.copies.items()}
    parameter = next(iter(trainer.state.params.values()))
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(Diverged, match="optimizer update 2 is nan"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert same(state, trainer.state.optimizer.tensors())
    assert same(anchor, trainer.state.anchor.copies)
    assert trainer.state.updates == 2
    assert all(p.grad is None for p in trainer.state.params.values())
