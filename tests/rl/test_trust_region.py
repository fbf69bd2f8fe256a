"""The trust region: which terms a mode uses, and that they pull towards their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sage_grpo.flow.kernels import Sage
from sage_grpo.rl.trust_region import TrustRegion, closed_form_kl

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
        rough = TrustRegion(mode=mode, estimator="log_ratio").penalty(**t)  # type: ignore[arg-type]
        if velocity is wanted[1]:
            torch.testing.assert_close(rough.total, t["log_prob_old"] - t["log_prob"])
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
    with pytest.raises(ValueError, match="needs the anchor's velocities"):
        TrustRegion(mode="dual").penalty(**{**_tensors(), "v_anchor": None})
    with pytest.raises(ValueError, match="compare them at the same x"):
        closed_form_kl(torch.zeros(2, 3), torch.zeros(3), torch.tensor(1.0))
