"""Losses at fresh noise levels, DiffusionNFT's and that of advantage-weighted matching, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from sage_grpo.rl.matching import ghuber_log_prob, nft_loss, optimality
from sage_grpo.rl.objective import ObjectiveSpec

SHAPE = (4, 3, 2)
DIMS = 6


def drawn(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_optimality_is_the_clipped_advantage_between_0_and_1() -> None:
    advantage = torch.tensor([-9.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0])
    assert optimality(advantage).tolist() == [0.0, 0.0, 0.25, 0.5, 0.625, 1.0, 1.0]
    assert optimality(advantage, saturation=4.0).tolist() == [0.0, 0.375, 0.4375, 0.5, 0.53125, 0.625, 1.0]


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("weight", ["uniform", "sigma", "adaptive"])
def test_the_gradient_at_the_old_policy_does_not_depend_on_beta(beta: float, weight: str) -> None:
    """2 w (2 r - 1) (v_old - u) / D: towards the target of good clips, away from that of bad ones."""
    v_old, target = drawn(2)
    v, r, sigma = v_old.clone().requires_grad_(), torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64), 0.4
    terms = nft_loss(v, v_old, target, r, beta=beta, sigma=sigma, weight=weight)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
    error = v_old - target
    w = {"uniform": 1.0, "sigma": sigma, "adaptive": sigma / error.abs().mean((1, 2), keepdim=True)}[weight]
    torch.testing.assert_close(gradient, 2 * w * (2 * r - 1).view(4, 1, 1) * error / DIMS)
    assert terms.ratio is None


def test_beta_is_a_leash_to_the_old_policy() -> None:
    """Up to a constant: 2 (2 r - 1) (v_old - u)(v - v_old) + beta |v - v_old|^2, which is least at v_old - (2 r - 1)(v_old - u) / beta."""
    v, v_old, target = drawn(3)
    r, beta = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64), 0.7
    error, sign = v_old - target, (2 * r - 1).view(4, 1, 1)

    def found(at: torch.Tensor) -> torch.Tensor:
        return nft_loss(at, v_old, target, r, beta=beta, sigma=0.3).loss

    formula = (2 * sign * error * (v - v_old) + beta * (v - v_old) ** 2).mean((1, 2))
    torch.testing.assert_close(found(v) - found(v_old), formula)
    best = (v_old - sign * error / beta).requires_grad_()
    assert torch.autograd.grad(found(best).sum(), best)[0].abs().max() < 1e-12


def test_adaptive_weights_are_the_papers_normalised_error_of_x0() -> None:
    v, v_old, target = drawn(3)
    x, sigma, beta = drawn(4)[3], 0.6, 0.5
    x0 = x - sigma * target
    r = torch.tensor([0.1, 0.4, 0.8, 1.0], dtype=torch.float64)
    expected = torch.zeros(4, dtype=torch.float64)
    for share, mixed in ((r, (1 - beta) * v_old + beta * v), (1 - r, (1 + beta) * v_old - beta * v)):
        error = (x - sigma * mixed) - x0
        expected += share * (error**2).mean((1, 2)) / error.abs().mean((1, 2))
    terms = nft_loss(v, v_old, target, r, beta=beta, sigma=sigma, weight="adaptive")
    torch.testing.assert_close(terms.loss, expected / beta)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="adaptive is part of nft"):
        ObjectiveSpec(kind="awm", weight="adaptive")
    with pytest.raises(ValueError, match=r"old_ramp .* needs objective\.old_decay"):
        ObjectiveSpec(kind="nft", old_ramp=3)
    with pytest.raises(ValueError, match="levels must be at least 1"):
        ObjectiveSpec(kind="nft", levels=0)


def test_the_old_policys_decay_and_passes() -> None:
    ramped = ObjectiveSpec(kind="nft", old_decay=0.5, old_ramp=10)
    assert [ramped.decay(n) for n in (0, 1, 5, 10, 99)] == [0.0, 0.05, 0.25, 0.5, 0.5]
    assert ramped.old_passes(2) == [True, True]
    assert ObjectiveSpec(kind="awm").old_passes(3) == [False, True, True]
    assert ObjectiveSpec(old_decay=0.5).old_passes(2) == [False, False]
    assert math.isclose(ObjectiveSpec(kind="nft", old_decay=0.3).decay(1), 0.3)


def test_nothing_is_clipped_and_a_perfect_prediction_costs_nothing() -> None:
    v = torch.ones(2, 3)
    terms = nft_loss(v, v, v, torch.tensor([0.0, 1.0]), beta=1.0, sigma=0.5, weight="adaptive")
    assert terms.loss.tolist() == [0.0, 0.0]
    assert not terms.inactive.any()


def test_ghuber_is_the_fourth_root_of_the_error_times_sigma() -> None:
    """-(sigma / p) ((E + 1e-10)^p - 1e-10^p) with p = 1/4, and its slope; also where the error is as small as what is added to it."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    sizes = torch.tensor([1e-5, 0.1, 1.0, 10.0], dtype=torch.float64).view(4, 1, 1)
    v = (target + sizes * torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)).requires_grad_()
    error = (v.detach() - target).square().mean((1, 2))
    value = ghuber_log_prob(v, target, sigma=0.3)
    (slope,) = torch.autograd.grad(value.sum(), v)
    torch.testing.assert_close(value.detach(), -1.2 * ((error + 1e-10) ** 0.25 - 1e-10**0.25), rtol=1e-9, atol=0)
    by_hand = -0.3 * (error + 1e-10).view(4, 1, 1) ** -0.75 * (v.detach() - target) * 2 / 6
    torch.testing.assert_close(slope, by_hand, rtol=1e-9, atol=0)


def test_a_perfect_prediction_has_no_slope() -> None:
    v = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    value = ghuber_log_prob(v, torch.ones(2, 3, dtype=torch.float64), sigma=0.5)
    (slope,) = torch.autograd.grad(value.sum(), v)
    assert value.tolist() == [0.0, 0.0]
    assert slope.abs().max() == 0


def test_what_ghuber_does_not_go_with_is_refused() -> None:
    for kind in ("nft", "surrogate"):
        with pytest.raises(ValueError, match=f"ghuber is part of awm: .* with objective.kind {kind}"):
            ObjectiveSpec(kind=kind, weight="ghuber")
    with pytest.raises(ValueError, match=r"old_samples false needs objective\.old_decay"):
        ObjectiveSpec(kind="awm", old_samples=False)
    held = ObjectiveSpec(kind="awm", weight="ghuber", old_decay=0.3, old_samples=False)
    assert held.lags
    assert held.old_passes(1) == [True]
