"""A loss or gradient that is not finite stops before the optimizer step, and the message names the step."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.cli import main
from sage_grpo.training.config import UpdateConfig
from sage_grpo.training.update import Diverged
from trainer_helpers import same, weights_of


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


def test_the_command_stops_with_1_and_keeps_the_last_good_checkpoint(
    make_config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    from trainer_zoo import toy

    config = make_config()
    forward, calls = toy.Net.forward, {"with_gradient": 0}

    def spoilt(self, x, sigma, words):
        v = forward(self, x, sigma, words)
        if torch.is_grad_enabled():
            calls["with_gradient"] += 1
        return v * float("nan") if calls["with_gradient"] > 6 else v

    monkeypatch.setattr(toy.Net, "forward", spoilt)
    arguments = [
        "train", "--out", config.out, "--model.family", "trainer_zoo.toy", "--data.prompts", config.data.prompts,
        "--rewards", '[{"name": "trainer_toys:bright"}]', "--iterations", "5", "--rollout.steps", "4",
        "--batch.prompts", "2", "--batch.micro_batch", "8", "--keep.checkpoint_every", "1", "--keep.videos_every", "0",
        "--log.tensorboard", "false",
    ]  # fmt: skip
    assert main(arguments) == 1
    assert "not finite at denoising step" in capsys.readouterr().out
    assert sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()) == ["000001", "000002"]
