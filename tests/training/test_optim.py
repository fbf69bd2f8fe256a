"""Optimizer and learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from double import CLOSE
from sage_grpo.training.config import OptimizerConfig
from sage_grpo.training.optim import Optimizer, learning_rate


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0, 0]),
    ],
)
def test_rates_warm_up_and_fall_to_zero_after_the_last_update(decay: str, rates: list[float]) -> None:
    config = OptimizerConfig(lr=2.0, warmup_updates=2, decay=decay)
    assert [learning_rate(config, update, 6) / 2 for update in range(8)] == pytest.approx(rates, abs=1e-6)
    assert learning_rate(config, 2, 1) == 2.0


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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_had_no_gradient_has_its_state_too(kind: str) -> None:
    params = parameters()
    optimizer = Optimizer(params, OptimizerConfig(kind=kind, lr=0.1), total_updates=1)
    params["bias"].grad = torch.ones(4)
    optimizer.step(0)
    assert {name.split("/")[1] for name in optimizer.tensors()} == {"matrix", "bias"}


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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon computes in bfloat16, which not every CPU has
def test_muon_moves_a_matrix_as_far_as_adamw_moves_it_and_decays_it_too() -> None:
    """Muon's own scale depends on a matrix's shape; this one gives every matrix about 0.2 lr, AdamW's usual step."""
    for shape, decay in (((64, 64), 0.0), ((256, 64), 0.4), ((32, 512), 0.0)):
        torch.manual_seed(0)
        params = {"matrix": nn.Parameter(torch.ones(shape))}
        optimizer = Optimizer(params, OptimizerConfig(kind="muon", lr=1e-2, weight_decay=decay), total_updates=1)
        params["matrix"].grad = torch.randn(shape)
        optimizer.step(0)
        moved = params["matrix"].detach() - (1 - 1e-2 * decay)
        assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.25), shape


def test_a_step_has_the_rate_of_its_number_times_the_factor_of_the_pace() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=10, weight_decay=0.0, target_kl=0.1)
    for update, factor, rate in ((0, 1.0, 0.1), (4, 0.5, 0.25)):
        params = parameters()
        start, optimizer = params["bias"].detach().clone(), Optimizer(params, config, total_updates=10)
        optimizer.pace.factor = factor
        for p in params.values():
            p.grad = torch.ones_like(p)
        assert optimizer.step(update) == pytest.approx(rate)
        moved = float((params["bias"].detach() - start).abs().mean())
        assert moved == pytest.approx(rate, rel=1e-4)  # AdamW's first step is the learning rate
