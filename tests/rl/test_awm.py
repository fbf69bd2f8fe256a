"""The weighting of advantage-weighted matching as its authors run it, against its formula."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.rl.matching import ghuber_log_prob
from sage_grpo.rl.objective import ObjectiveSpec


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


def test_what_does_not_go_together_is_refused() -> None:
    for kind in ("nft", "surrogate"):
        with pytest.raises(ValueError, match=f"ghuber is part of awm: .* with objective.kind {kind}"):
            ObjectiveSpec(kind=kind, weight="ghuber")
    with pytest.raises(ValueError, match=r"old_samples false needs objective\.old_decay"):
        ObjectiveSpec(kind="awm", old_samples=False)
    held = ObjectiveSpec(kind="awm", weight="ghuber", old_decay=0.3, old_samples=False)
    assert held.lags
    assert held.old_passes(1) == [True]
