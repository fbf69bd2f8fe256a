"""Earlier rollouts: what they add to an update is their own gradient, weighed by how much the policy has moved; and they outlive a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_grpo.flow.windows import Window
from sage_grpo.recipes.methods import METHODS
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import OptimizerConfig, UpdateConfig
from sage_grpo.training.state import TrainState
from trainer_helpers import assert_resumes_to_the_bit

ONCE = UpdateConfig(updates_per_rollout=1)
STILL = OptimizerConfig(lr=1e-18, weight_decay=0.0, max_grad_norm=1e9)
"""The weights move by nothing that a float can hold."""


def sent(trainer) -> dict[str, torch.Tensor]:
    """The gradient of the next update."""
    kept = {}
    step = trainer.state.optimizer.step

    def look(update: int) -> float:
        kept.update({name: p.grad.detach().clone() for name, p in trainer.state.params.items()})
        return step(update)

    trainer.state.optimizer.step = look
    trainer.step()
    trainer.state.optimizer.step = step
    return kept


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("rollout", [{}, {"window": Window(kind="drawn", length=1), "same_noise": True}])
def test_without_a_move_the_gradient_is_the_mean_over_iterations(rollout, make_config, make_trainer) -> None:
    config = make_config(rollout=rollout, update=ONCE, optimizer=STILL, iterations=4)
    alone, both = make_trainer(config), make_trainer(replace(config, update=replace(ONCE, reuse=2)))
    gradients = [sent(alone) for _ in range(4)]
    for iteration in range(4):
        own = gradients[max(0, iteration - 2) : iteration + 1]  # the newest and at most two earlier ones
        for name, found in sent(both).items():
            torch.testing.assert_close(found, sum(one[name] for one in own) / len(own), rtol=1e-9, atol=1e-12)
    assert both.log[-1]["reuse/counts"] == pytest.approx(1.0, abs=1e-6)
    assert both.log[-1]["reuse/cut"] == 0.0
    assert "reuse/counts" not in both.log[0]


def test_the_newest_rollout_is_on_policy_to_the_bit_and_earlier_ones_are_not(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(update=UpdateConfig(updates_per_rollout=2, reuse=1)))
    rows = [trainer.step() for _ in range(3)]
    assert [row["ratio/first_log"] for row in rows] == [0.0, 0.0, 0.0]
    assert rows[1]["reuse/counts"] != 1.0
    # Means over the newest part alone: the mean of ratios is near 1, not near its share of the update.
    assert trainer.log[-1]["ratio/mean"] == pytest.approx(1.0, abs=0.1)
    assert trainer.log[-1]["ratio/std"] > 0


def test_it_resumes_to_the_bit(make_config, make_trainer, tmp_path) -> None:
    """Also where clips are chosen by their rewards, states are stored in half precision, and losses ask for old velocities."""
    config = make_config(
        rollout={"storage": "bfloat16"},
        update=UpdateConfig(updates_per_rollout=2, reuse=2, deal="clips"),
        trust_region=TrustRegion(mode="dual"),
        iterations=4,
    )
    assert_resumes_to_the_bit(make_trainer, config, tmp_path)


def test_a_checkpoint_of_other_ranks_or_batches_is_refused(make_config, make_trainer, tmp_path) -> None:
    config = make_config(update=replace(ONCE, reuse=1))
    trainer = make_trainer(config)
    trainer.step()
    folder = trainer.save(tmp_path)
    trainer.writer.finish()
    other = make_trainer(config)
    other.state.shelf.ranks = 2
    with pytest.raises(ValueError, match=r"each of 1 ranks kept .* now there are 2: continue with 1"):
        other.state.load(folder, other.world)
    other = make_trainer(replace(config, batch=replace(config.batch, group_size=2)))
    with pytest.raises(ValueError, match="has 8 clips, and one has 4 now"):
        other.state.load(folder, other.world)


def test_going_back_forgets_what_the_run_goes_back_from(make_config, make_trainer, tmp_path) -> None:
    trainer = make_trainer(make_config(update=replace(ONCE, reuse=1)))
    trainer.step()
    folder = trainer.save(tmp_path)
    trainer.writer.finish()
    trainer.step()
    state: TrainState = trainer.state
    assert [lesson.plan.iteration for lesson in state.shelf.lessons] == [1]
    state.go_back(folder, trainer.world)
    assert state.shelf.lessons == []
    assert "reuse/counts" not in trainer.step()


@pytest.mark.parametrize("method", ["nft", "awm", "dpo", "rft", "draft"])
def test_without_gaussian_steps_it_is_refused(method: str, make_config) -> None:
    config = METHODS[method](make_config())
    with pytest.raises(ValueError, match=r"update\.reuse 1: no step is a Gaussian"):
        replace(config, update=replace(config.update, reuse=1))
