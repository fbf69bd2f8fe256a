"""Optimizer and learning rate."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from sage_grpo.train.config import OptimizerConfig
from sage_grpo.train.optim import Optimizer, learning_rate


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=4)
    assert [learning_rate(config, update, 10) for update in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_falls_from_the_peak_towards_zero(decay: str) -> None:
    config = OptimizerConfig(lr=2.0, warmup_updates=2, decay=decay)
    rates = [learning_rate(config, update, 12) for update in range(2, 13)]
    assert rates[0] == 2.0
    assert rates[5] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b for a, b in pairwise(rates))
    assert learning_rate(config, 99, 12) == pytest.approx(0.0, abs=1e-12)  # a run that is continued beyond its plan


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"matrix": nn.Parameter(torch.randn(4, 3)), "bias": nn.Parameter(torch.randn(4))}


def take(optimizer: Optimizer, updates: range) -> None:
    for update in updates:
        for number, p in enumerate(optimizer.params.values()):
            p.grad = torch.full_like(p, 0.1 * (update + 1) * (number + 1))
        optimizer.step(update)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_name_continues_to_the_bit(kind: str) -> None:
    config = OptimizerConfig(kind=kind, lr=0.1)
    whole, first, second = parameters(), parameters(), parameters()
    take(Optimizer(whole, config, total_updates=6), range(6))
    before = Optimizer(first, config, total_updates=6)
    take(before, range(3))
    after = Optimizer(second, config, total_updates=6)
    with torch.no_grad():
        for name, p in second.items():
            p.copy_(first[name])
    after.load_tensors({name: tensor.clone() for name, tensor in before.tensors().items()})
    take(after, range(3, 6))
    assert all(torch.equal(whole[name], second[name]) for name in whole)
    keys = {name.rsplit("/", 1)[-1] for name in before.tensors() if "/matrix/" in name}
    assert keys == ({"momentum_buffer"} if kind == "muon" else {"step", "exp_avg", "exp_avg_sq"})


def test_empty_state_has_the_names_of_a_full_one() -> None:
    for kind in ("adamw", "muon"):
        config = OptimizerConfig(kind=kind)
        used, fresh = (Optimizer(parameters(), config, total_updates=1) for _ in range(2))
        take(used, range(1))
        fresh.materialize()
        assert {k: t.shape for k, t in fresh.tensors().items()} == {k: t.shape for k, t in used.tensors().items()}


def test_the_configured_learning_rate_is_the_one_used() -> None:
    small, large = parameters(), parameters()
    start = small["bias"].detach().clone()
    for params, lr in ((small, 1e-3), (large, 1e-2)):
        take(Optimizer(params, OptimizerConfig(lr=lr, weight_decay=0.0), total_updates=1), range(1))
    moved = [(params["bias"].detach() - start).abs().mean() for params in (small, large)]
    assert float(moved[1] / moved[0]) == pytest.approx(10, rel=1e-3)
