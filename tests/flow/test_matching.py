"""The law of the velocity at a fresh noise level is the flow-matching loss."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.flow.matching import Matching
from sage_grpo.rl.trust_region import closed_form_kl


@pytest.mark.parametrize(("by_sigma", "weight"), [(False, 1.0), (True, 0.3)])
def test_log_probability_and_kl_are_squared_errors(by_sigma: bool, weight: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, v, v_ref, target = (torch.randn(3, 4, 2, generator=generator) for _ in range(4))
    law = Matching(by_sigma=by_sigma)(torch.tensor(0.3), torch.tensor(0.1))
    change = law(x, v).log_prob(target) - law(x, v_ref).log_prob(target)
    errors = [((target - one) ** 2).mean((1, 2)) for one in (v, v_ref)]
    torch.testing.assert_close(change, weight * (errors[1] - errors[0]), atol=1e-6, rtol=1e-5)
    kl = weight * ((v - v_ref) ** 2).mean((1, 2))
    torch.testing.assert_close(law(x, v).kl(law(x, v_ref)), kl)
    torch.testing.assert_close(closed_form_kl(v, v_ref, law.sensitivity), kl)


def test_nothing_is_sampled_with_it_so_that_it_leaves_no_noise() -> None:
    assert not Matching().leaves_noise
