"""Learning rate, epsilon and clipping mean the same at any resolution and model size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.optim import Optimizer

SMALL = {"frames": 1, "height": 16, "width": 16}
LARGE = {"frames": 9, "height": 64, "width": 64}


def first_update(make_config, make_trainer, size: dict, eps: float) -> tuple[int, dict[str, float], float]:
    """Latent dimensions, metrics and the mean step in units of the learning rate."""
    lr = 1e-6
    trainer = make_trainer(
        make_config(
            kind="wan_t2v",
            model=size,
            rollout={"steps": 3},
            batch=BatchConfig(prompts=3, group_size=6, micro_batch=6),
            update=UpdateConfig(updates_per_rollout=1),
            trust_region=TrustRegion(mode="none"),
            optimizer=OptimizerConfig(lr=lr, eps=eps, weight_decay=0.0, max_grad_norm=1e9),
        )
    )
    before = {name: p.detach().clone() for name, p in trainer.state.params.items()}
    metrics = trainer.step()
    moved = torch.cat([(p.detach() - before[name]).flatten() for name, p in trainer.state.params.items()])
    return trainer.objective.dims, metrics, float(moved.abs().mean()) / lr


@pytest.mark.slow
def test_the_step_does_not_depend_on_the_number_of_latent_dimensions(make_config, make_trainer) -> None:
    """With an epsilon as large as the gradients a step is about half of lr; a scale that fell with D would show at once."""
    eps = 1e-3
    dims, small, step = first_update(make_config, make_trainer, SMALL, eps)
    more, large, step_large = first_update(make_config, make_trainer, LARGE, eps)
    assert more >= 40 * dims
    assert large["gradient/norm"] == pytest.approx(small["gradient/norm"], rel=0.6)
    assert 0.05 < step < 0.95  # epsilon matters here, so that the comparison can fail
    assert step_large == pytest.approx(step, rel=0.25)


def test_gradients_are_logged_against_epsilon(make_config, make_trainer) -> None:
    _, metrics, _ = first_update(make_config, make_trainer, SMALL, 1e-6)
    _, larger, _ = first_update(make_config, make_trainer, SMALL, 1e-4)
    assert metrics["gradient/rms_over_eps"] == pytest.approx(100 * larger["gradient/rms_over_eps"], rel=1e-6)
    trainer = make_trainer(make_config(kind="wan_t2v", model=SMALL))
    count = sum(p.numel() for p in trainer.state.params.values())
    expected = metrics["gradient/norm"] / math.sqrt(count) / 1e-6
    assert metrics["gradient/rms_over_eps"] == pytest.approx(expected, rel=1e-6)


def test_clipping_binds_where_it_is_told_to(make_config, make_trainer) -> None:
    """The norm that is logged is the one before clipping; the one that the optimizer sees is at most the limit."""
    trainer = make_trainer(make_config(optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.01)))
    seen, step = [], trainer.state.optimizer.step

    def noted(update: int) -> float:
        seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in trainer.state.params.values())))
        return step(update)

    trainer.state.optimizer.step = noted
    metrics = trainer.step()
    assert metrics["gradient/norm"] > 0.01
    assert seen == pytest.approx([0.01] * len(seen), rel=1e-3)


def test_muon_moves_a_matrix_as_far_as_adamw_moves_it() -> None:
    """Muon's own scale depends on a matrix's shape; this one gives every matrix about 0.2 lr, AdamW's usual step."""
    for shape in ((64, 64), (256, 64), (32, 512)):
        torch.manual_seed(0)
        params = {"matrix": nn.Parameter(torch.zeros(shape))}
        optimizer = Optimizer(params, OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.0), total_updates=1)
        params["matrix"].grad = torch.randn(shape)
        optimizer.step(0)
        rms = float(params["matrix"].detach().square().mean().sqrt())
        assert rms == pytest.approx(0.2 * 1e-2, rel=0.25), shape
