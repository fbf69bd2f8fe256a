"""Losses at fresh noise levels, DiffusionNFT's and that of advantage-weighted matching, against their formulas; and what an objective says of itself."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from sage_grpo.objectives.build import build
from sage_grpo.objectives.matching import ghuber_log_prob, nft_loss, optimality
from sage_grpo.objectives.options import ObjectiveSpec

GOOD = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)


def drawn(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 3, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_optimality_is_the_clipped_advantage_between_0_and_1() -> None:
    advantage = torch.tensor([-9.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0])
    assert optimality(advantage).tolist() == [0.0, 0.0, 0.25, 0.5, 0.625, 1.0, 1.0]
    assert optimality(advantage, saturation=4.0).tolist() == [0.0, 0.375, 0.4375, 0.5, 0.53125, 0.625, 1.0]


@pytest.mark.parametrize(("beta", "saturation"), [(0.1, 1.0), (1.0, 3.0), (2.5, 1.0)])
@pytest.mark.parametrize("weight", ["uniform", "adaptive"])
def test_the_loss_is_the_papers_and_its_gradient_at_the_old_policy_does_not_depend_on_beta(
    beta: float, saturation: float, weight: str
) -> None:
    """Of x0 = x - sigma v; there 2 s w (2 r - 1) (v_old - u) / D: toward the target of good clips, away from that of bad ones."""
    v, v_old, target, x = drawn(4)
    spec, sigma = ObjectiveSpec(kind="nft", beta=beta, weight=weight, saturation=saturation), 0.4
    expected = torch.zeros(4, dtype=torch.float64)
    for share, sign in ((GOOD, 1), (1 - GOOD, -1)):
        error = (x - sigma * ((1 - sign * beta) * v_old + sign * beta * v)) - (x - sigma * target)
        square = (error**2).mean((1, 2))
        scale = {"uniform": sigma**2, "adaptive": error.abs().mean((1, 2))}[weight]
        expected += share * square / scale
    terms = nft_loss(spec, v, v_old, target, GOOD, sigma=sigma)
    torch.testing.assert_close(terms.loss, saturation * expected / beta)
    assert not terms.inactive.any()
    assert terms.ratio is None
    at = v_old.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nft_loss(spec, at, v_old, target, GOOD, sigma=sigma).loss.sum(), at)
    error = v_old - target
    w = {"uniform": 1.0, "adaptive": sigma / error.abs().mean((1, 2), keepdim=True)}[weight]
    torch.testing.assert_close(gradient, 2 * saturation * w * (2 * GOOD - 1).view(4, 1, 1) * error / 6)
    assert nft_loss(spec, v, v, v, GOOD, sigma=sigma).loss.max() < 1e-12


def test_ghuber_is_the_fourth_root_of_the_error_times_sigma() -> None:
    """-(sigma / p) ((E + 1e-10)^p - 1e-10^p) with p = 1/4, and its slope; also where the error is 0 or as small as what is added to it."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    sizes = torch.tensor([0.0, 1e-5, 0.1, 10.0], dtype=torch.float64).view(4, 1, 1)
    v = (target + sizes * torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)).requires_grad_()
    error = (v.detach() - target).square().mean((1, 2))
    value = ghuber_log_prob(v, target, sigma=0.3)
    (slope,) = torch.autograd.grad(value.sum(), v)
    torch.testing.assert_close(value.detach(), -1.2 * ((error + 1e-10) ** 0.25 - 1e-10**0.25), rtol=1e-9, atol=0)
    by_hand = -0.3 * (error + 1e-10).view(4, 1, 1) ** -0.75 * (v.detach() - target) * 2 / 6
    torch.testing.assert_close(slope, by_hand, rtol=1e-9, atol=0)
    assert float(value[0].detach()) == 0.0


KINDS = ("surrogate", "nft", "awm", "gradient", "dpo", "sft")
TAKEN = {
    "weight": {"adaptive": "surrogate nft", "ghuber": "awm"},
    "draw": {"schedule": " ".join(KINDS), "strata": "surrogate nft awm dpo sft", "last": "surrogate gradient"},
    "credit": {"exact": "surrogate"},
    "predict": {0.5: "surrogate gradient"},
    "old_decay": {0.5: "surrogate nft awm"},
    "old_ramp": {3: ""},
    "old_samples": {False: ""},
}
"""Every option with the kinds that take it when nothing else is given."""


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, row in TAKEN.items() for value in row])
def test_an_objective_takes_the_options_that_mean_something_for_its_kind(option: str, value: object) -> None:
    def taken(kind: str) -> bool:
        try:
            ObjectiveSpec(kind=kind, **{option: value})
        except ValueError as error:
            return f"objective.{option}" not in str(error)
        return True

    assert " ".join(filter(taken, KINDS)) == TAKEN[option][value]


def test_options_that_need_another() -> None:
    assert ObjectiveSpec(kind="gradient", credit="exact", draw="last").credit == "exact"
    with pytest.raises(ValueError, match=r"credit exact needs objective\.draw last"):
        ObjectiveSpec(kind="gradient", credit="exact")
    for given in ({"old_ramp": 3}, {"old_samples": False}):
        assert build(ObjectiveSpec(kind="nft", old_decay=0.5, **given)).lags
    with pytest.raises(ValueError, match="levels must be at least 1"):
        ObjectiveSpec(kind="nft", levels=0)


def test_what_the_kinds_are() -> None:
    names = ("samples", "differentiates", "chooses", "given_clips", "in_pairs", "lags")
    rows = {kind: [getattr(build(ObjectiveSpec(kind=kind)), name) for name in names] for kind in KINDS}
    assert rows == {
        "surrogate": ["sde", False, False, 0, False, False],
        "nft": ["ode", False, False, 0, False, False],
        "awm": ["ode", False, False, 0, False, False],
        "gradient": ["ode", True, False, 0, False, False],
        "dpo": ["ode", False, True, 2, True, False],
        "sft": ["ode", False, True, 1, False, False],
    }
    for kind, lags in itertools.product(("nft", "awm"), (False, True)):
        one = build(ObjectiveSpec(kind=kind, old_decay=0.5 * lags))
        assert (one.lags, one.old_passes(3)) == (lags, [lags, True, True])
    surrogate = build(ObjectiveSpec(old_decay=0.5))
    assert (surrogate.lags, surrogate.old_passes(2)) == (False, [False, False])


def test_the_old_policys_decay() -> None:
    ramped = ObjectiveSpec(kind="nft", old_decay=0.5, old_ramp=10)
    assert [build(ramped).decay(n) for n in (0, 1, 5, 10, 99)] == [0.0, 0.05, 0.25, 0.5, 0.5]
    assert build(dataclasses.replace(ramped, old_ramp=0)).decay(0) == 0.5
