"""Surrogates, the trust region and the equalizer: gradients where they should be, none where they are removed, the same at every step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sage_grpo.objectives.options import ObjectiveSpec, SurrogateConfig
from sage_grpo.objectives.policy_gradient import (
    PolicyGradient,
    centred_log_ratio,
    clipped_surrogate,
    equalizing_weights,
    kl_masked_surrogate,
    scaled_surrogate,
)
from sage_grpo.objectives.trust_region import TrustRegion, closed_form_kl
from sage_grpo.samplers.kernels import Sage


def test_centring_adds_the_kl_and_no_gradient_of_its_own() -> None:
    """Under the old policy the log-ratio is minus the KL on average."""
    kl, log_ratio = torch.tensor([0.25], requires_grad=True), torch.tensor([-0.5], requires_grad=True)
    centred = centred_log_ratio(log_ratio, kl)
    assert centred.tolist() == [-0.25]
    centred.sum().backward()
    assert kl.grad is None
    assert log_ratio.grad is not None


def test_the_clipped_loss_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.125, 1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 0.5, -0.5, 0.0, 0.0])
    log_ratio = ratio.log().requires_grad_()
    terms = clipped_surrogate(log_ratio, advantage, clip=0.25)
    expected = [-2.5, 3.0, -1.0, 1.5, -2.25, -0.625, 0.375, 0.0, 0.0]
    assert terms.loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert terms.inactive.tolist() == [True, False, False, True, False, True, True, False, False]
    assert terms.ratio is not None
    assert not terms.ratio.requires_grad
    terms.loss.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.where(terms.inactive, 0.0, -ratio * advantage))


def test_flow_grpos_metrics_by_hand() -> None:
    """Its clipfrac counts every ratio outside the range; where another rule than a range drops clips there is none."""
    ratio = torch.tensor([1.5, 0.5, 1.125, 1.0])
    step = SimpleNamespace(log_prob=ratio.log(), log_prob_old=torch.zeros(4), dims=64)
    found = PolicyGradient(ObjectiveSpec(), SurrogateConfig(clip_range=0.25)).metrics(step)  # type: ignore[arg-type]
    torch.testing.assert_close(found["approx_kl"], ratio.log() ** 2 / 2)
    assert found["clipfrac"].tolist() == [1.0, 1.0, 0.0, 0.0]
    for options in ({"kind": "kl_mask"}, {"centred": True}):
        other = PolicyGradient(ObjectiveSpec(), SurrogateConfig(**options)).metrics(step)  # type: ignore[arg-type]
        assert list(other) == ["approx_kl"]


def test_the_masked_loss_by_hand() -> None:
    """Dropped where the KL has reached tau and the ratio has moved to where the advantage points; one that has not moved stays."""
    ratio = torch.tensor([1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.5, 0.5])
    advantage = torch.tensor([2.0, 0.5, -2.0, -2.0, -0.5, 2.0, 2.0, -2.0, 0.0, 0.0])
    for kl, dropped in ((0.5, False), (1.0, True), (2.0, True)):
        terms = kl_masked_surrogate(ratio.log().requires_grad_(), advantage, torch.full_like(ratio, kl), tau=1.0)
        inactive = [dropped and index in (0, 1, 3, 4) for index in range(len(ratio))]
        assert terms.inactive.tolist() == inactive
        plain = (-ratio * advantage).tolist()
        assert terms.loss.tolist() == pytest.approx([0.0 if gone else value for gone, value in zip(inactive, plain)])
        assert terms.ratio is not None
        assert not terms.ratio.requires_grad


def test_the_scaled_loss_by_hand() -> None:
    """exp(std (log r + KL)) is clipped; the loss is divided by std; the KL has a gradient of its own."""
    std = torch.tensor(0.5)
    wanted = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.125])  # the scaled ratio
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    kl = torch.full((5,), 0.25).requires_grad_()
    log_ratio = (wanted.log() / 0.5 - 0.25).requires_grad_()
    terms = scaled_surrogate(log_ratio, advantage, kl, std=std, clip=0.25)
    assert terms.loss.tolist() == pytest.approx([-5.0, 6.0, -2.0, 3.0, -4.5], abs=1e-5)
    assert terms.inactive.tolist() == [True, False, False, True, False]
    assert terms.ratio is not None
    assert terms.ratio.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    terms.loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.25], abs=1e-5)
    assert torch.equal(log_ratio.grad, kl.grad)


def test_the_scaled_loss_tells_ratios_apart_that_float32_does_not() -> None:
    """Clip ranges of full size are 1e-7: three of float32's last places at 1."""
    log_ratio = torch.tensor([0.9e-7, 1.1e-7, -0.9e-7, -1.1e-7])
    terms = scaled_surrogate(
        log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4), std=torch.tensor(1.0), clip=1e-7
    )
    assert terms.inactive.tolist() == [False, True, False, True]


def _tensors() -> dict[str, Tensor]:
    step = Sage(eta=0.5)(0.9, 0.8)
    v, v_old, v_reference = torch.randn(3, 3, 2, 5)
    return {"v": v, "v_old": v_old, "v_reference": v_reference, "sensitivity": step.sensitivity, "clips": 3}


def test_modes_use_the_terms_they_name() -> None:
    t = _tensors()
    position = closed_form_kl(t["v"], t["v_reference"], t["sensitivity"])
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


def test_the_kl_by_hand_in_float32_and_by_step_where_the_sensitivity_has_steps() -> None:
    """1/2 sensitivity^2 mean(difference^2); a mean of squares in bfloat16 would lose most of its digits."""
    v, v_ref = torch.tensor([[[1.0, 3.0], [0.0, 4.0]]] * 2), torch.zeros(2, 2, 2)
    assert closed_form_kl(v, v_ref, torch.tensor(2.0)).tolist() == [13.0, 13.0]
    assert closed_form_kl(v, v_ref, torch.tensor([1.0, 2.0])).tolist() == [3.25, 13.0]
    assert closed_form_kl(v, v_ref, torch.tensor([[1.0, 2.0], [2.0, 0.0]])).tolist() == [[2.5, 16.0], [10.0, 0.0]]
    low, low_ref = (torch.linspace(a, 2.0, 4000)[None].bfloat16() for a in (-1.0, -1.1))
    found = closed_form_kl(low, low_ref, torch.tensor(1.0))
    assert torch.equal(found, closed_form_kl(low.float(), low_ref.float(), torch.tensor(1.0)))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="compare them at the same x"):
        closed_form_kl(torch.zeros(2, 3), torch.zeros(3), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("values", "cap", "weights"),
    [
        ([4.0], None, [1.0]),
        ([8.0, 0.5, 2.0], None, [0.25, 4.0, 1.0]),
        ([8.0, 0.5, 2.0], 3.0, [0.25, 3.0, 1.0]),
        ([1.0, 2.0, 4.0, 16.0], None, [3.0, 1.5, 0.75, 0.1875]),
    ],
)
def test_weights_times_sensitivity_is_the_median_everywhere(values: list, cap: float | None, weights: list) -> None:
    """But for a cap, which bounds the large weights and leaves the others."""
    found = equalizing_weights(torch.tensor(values), cap=cap)
    assert found.dtype == torch.float32
    assert found.tolist() == weights
