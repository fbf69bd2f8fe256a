"""The trust region: which terms a mode uses, and that they pull towards their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sage_grpo.flow.kernels import Sage
from sage_grpo.rl.trust_region import TrustRegion, closed_form_kl, log_ratio_kl

STEP = Sage(eta=0.5)(0.9, 0.8)


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(3, 2, 5, generator=generator)

    x, v, v_old, v_anchor = draw(), draw(), draw(), draw()
    x_next = STEP(x, v_old).sample(draw())
    return {
        "v": v,
        "v_old": v_old,
        "v_anchor": v_anchor,
        "sensitivity": STEP.sensitivity,
        "log_prob": STEP(x, v).log_prob(x_next),
        "log_prob_old": STEP(x, v_old).log_prob(x_next),
    }


def test_modes_use_the_terms_they_name() -> None:
    t = _tensors()
    position = closed_form_kl(t["v"], t["v_anchor"], t["sensitivity"])
    velocity = closed_form_kl(t["v"], t["v_old"], t["sensitivity"])
    expected = {
        "none": (None, None, None),
        "fixed": (position, None, position),
        "moving": (position, None, position),
        "stepwise": (None, velocity, velocity),
        "dual": (position, 0.1 * velocity, position + 0.1 * velocity),
        "fixed_dual": (position, 0.1 * velocity, position + 0.1 * velocity),
    }
    for mode, wanted in expected.items():
        region = TrustRegion(mode=mode)  # type: ignore[arg-type]
        terms = region.penalty(**t)
        for found, value in zip((terms.position, terms.velocity, terms.total), wanted):
            assert (found is None) == (value is None)
            if found is not None:
                torch.testing.assert_close(found, value)
        assert region.uses_anchor == (wanted[0] is not None)
        assert region.uses_stepwise == (wanted[1] is not None)
        assert region.renews_anchor == (mode in ("moving", "dual"))


def test_dual_weights_are_the_users() -> None:
    t = _tensors()
    terms = TrustRegion(mode="dual", beta_position=0.3, beta_velocity=2.0).penalty(**t)
    expected = 0.3 * closed_form_kl(t["v"], t["v_anchor"], t["sensitivity"])
    expected = expected + 2.0 * closed_form_kl(t["v"], t["v_old"], t["sensitivity"])
    torch.testing.assert_close(terms.total, expected)


def test_the_log_ratio_estimator_agrees_with_the_closed_form_on_average() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4).expand(50_000, 4)
    v_old = torch.randn(1, 4).expand(50_000, 4)
    v = v_old + 0.05
    old = STEP(x, v_old)
    x_next = old.sample(torch.randn(50_000, 4))
    estimate = log_ratio_kl(old.log_prob(x_next), STEP(x, v).log_prob(x_next))
    exact = closed_form_kl(v[:1], v_old[:1], STEP.sensitivity)
    error = float(estimate.std()) / 50_000**0.5
    assert float(estimate.mean()) == pytest.approx(float(exact), abs=4 * error)
    region = TrustRegion(mode="stepwise", estimator="log_ratio")
    t = _tensors()
    torch.testing.assert_close(region.penalty(**t).total, t["log_prob_old"] - t["log_prob"])


def test_descending_the_penalty_moves_towards_the_anchor() -> None:
    t = _tensors()
    v = t["v"].clone().requires_grad_()
    total = TrustRegion(mode="moving").penalty(**{**t, "v": v}).total
    assert total is not None
    total.sum().backward()
    nearer = v.detach() - 0.1 * v.grad
    assert (nearer - t["v_anchor"]).norm() < (v.detach() - t["v_anchor"]).norm()
    torch.testing.assert_close(v.grad, STEP.sensitivity**2 * (v.detach() - t["v_anchor"]) / 10)


def test_steps_and_samples_at_once_equal_one_by_one() -> None:
    torch.manual_seed(0)
    v, v_ref, sensitivity = torch.randn(4, 3, 6), torch.randn(4, 3, 6), torch.rand(4, 3) + 0.1
    both = closed_form_kl(v, v_ref, sensitivity)
    assert both.shape == (4, 3)
    for step in range(4):
        torch.testing.assert_close(both[step], closed_form_kl(v[step], v_ref[step], sensitivity[step]))


def test_low_precision_velocities_are_compared_in_float32() -> None:
    torch.manual_seed(0)
    v = torch.randn(2, 4000).bfloat16()
    v_ref = (v.float() * 1.02).bfloat16()
    exact = closed_form_kl(v.float(), v_ref.float(), torch.tensor(1.0))
    found = closed_form_kl(v, v_ref, torch.tensor(1.0))
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


def test_bad_options_are_refused() -> None:
    with pytest.raises(
        ValueError, match="mode must be one of none, fixed, stepwise, moving, dual, fixed_dual, got 'duel'"
    ):
        TrustRegion(mode="duel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="estimator must be one of closed_form, log_ratio, got 'k3'"):
        TrustRegion(estimator="k3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beta_velocity must be at least 0"):
        TrustRegion(beta_velocity=-0.1)
    with pytest.raises(ValueError, match="needs the anchor's velocities"):
        TrustRegion(mode="dual").penalty(**{**_tensors(), "v_anchor": None})
    with pytest.raises(ValueError, match="compare them at the same x"):
        closed_form_kl(torch.zeros(2, 3), torch.zeros(3), torch.tensor(1.0))
