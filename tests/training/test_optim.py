"""Optimizer and learning rate."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from double import CLOSE
from sage_grpo.training.config import OptimizerConfig
from sage_grpo.training.optim import Optimizer, learning_rate


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


@pytest.mark.usefixtures("in_double")
def test_adamw_is_its_formula_with_every_option() -> None:
    config = OptimizerConfig(lr=0.1, betas=(0.5, 0.8), eps=0.3, weight_decay=0.4)
    params = parameters()
    p, m, v = params["bias"].detach().clone().double(), 0.0, 0.0
    optimizer = Optimizer(params, config, total_updates=3)
    for update in range(3):
        g = 0.2 * (update + 1)  # what `take` gives to the second parameter
        m, v = 0.5 * m + 0.5 * g, 0.8 * v + 0.2 * g * g
        step = (m / (1 - 0.5 ** (update + 1))) / (math.sqrt(v / (1 - 0.8 ** (update + 1))) + 0.3)
        p = p * (1 - 0.1 * 0.4) - 0.1 * step
        take(optimizer, range(update, update + 1))
        torch.testing.assert_close(params["bias"].detach(), p, rtol=CLOSE, atol=CLOSE)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon computes in bfloat16, which not every CPU has
def test_muon_decays_matrices_too() -> None:
    params = parameters()
    start = params["matrix"].detach().clone()
    optimizer = Optimizer(params, OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.4), total_updates=1)
    params["matrix"].grad = torch.zeros_like(start)
    optimizer.step(0)
    torch.testing.assert_close(params["matrix"].detach(), start * (1 - 0.1 * 0.4))


def test_updates_use_the_rate_of_their_number() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=10, weight_decay=0.0)
    moved = []
    for update in (0, 4):
        params = parameters()
        start = params["bias"].detach().clone()
        take(Optimizer(params, config, total_updates=10), range(update, update + 1))
        moved.append(float((params["bias"].detach() - start).abs().mean()))
    assert moved == pytest.approx([0.1, 0.5], rel=1e-4)  # AdamW's first step is the learning rate


def test_a_step_leaves_the_switch_of_onednn_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch turns it off when a matrix product in bfloat16 fails, as Muon's do on many CPUs."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    params = parameters()
    optimizer = Optimizer(params, OptimizerConfig(kind="muon", lr=0.1), total_updates=1)
    monkeypatch.setattr(optimizer.parts[0], "step", lambda: setattr(torch.backends.mkldnn, "enabled", False))
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step(0)
    assert torch.backends.mkldnn.enabled


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
