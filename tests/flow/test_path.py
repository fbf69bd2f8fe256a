"""The convention is consistent with itself, the law at a fresh level is the flow-matching loss, and noise goes by its key alone."""

from __future__ import annotations

import hashlib

import pytest
import torch

from sage_grpo.flow.matching import Matching
from sage_grpo.flow.noise import keyed_noise, keyed_seed
from sage_grpo.flow.path import interpolate, velocity
from sage_grpo.rl.trust_region import closed_form_kl


@pytest.mark.parametrize("sigma", [0.125, 0.5, 1.0])
def test_a_velocity_gives_back_both_ends_of_its_path(sigma: float) -> None:
    x0, eps = torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0])
    x, v = interpolate(x0, eps, sigma), velocity(x0, eps)
    assert x.tolist() == [(1 - sigma) * 3 + sigma * 0.5, -(1 - sigma) + sigma * 2]
    assert v.tolist() == [-2.5, 3.0]
    assert torch.equal(x - sigma * v, x0)
    assert torch.equal(x + (1 - sigma) * v, eps)


@pytest.mark.parametrize(("by_sigma", "weight"), [(False, 1.0), (True, 0.3)])
def test_log_probability_and_kl_are_squared_errors(by_sigma: bool, weight: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, v, v_ref, target = (torch.randn(3, 4, 2, generator=generator) for _ in range(4))
    assert not Matching().leaves_noise
    law = Matching(by_sigma=by_sigma)(torch.tensor(0.3), torch.tensor(0.1))
    change = law(x, v).log_prob(target) - law(x, v_ref).log_prob(target)
    errors = [((target - one) ** 2).mean((1, 2)) for one in (v, v_ref)]
    torch.testing.assert_close(change, weight * (errors[1] - errors[0]), atol=1e-6, rtol=1e-5)
    kl = weight * ((v - v_ref) ** 2).mean((1, 2))
    torch.testing.assert_close(law(x, v).kl(law(x, v_ref)), kl)
    torch.testing.assert_close(closed_form_kl(v, v_ref, law.sensitivity), kl)


def test_a_seed_is_the_upper_63_bits_of_a_hash_of_its_key() -> None:
    digest = hashlib.blake2b(b"7/3/noise", digest_size=8).digest()
    assert keyed_seed(7, 3, "noise") == int.from_bytes(digest, "little") // 2


def test_noise_goes_by_its_key() -> None:
    one = keyed_noise((3, 4), 1, "a")
    assert (one.shape, one.dtype) == ((3, 4), torch.float32)
    assert torch.equal(one, keyed_noise((3, 4), 1, "a"))
    assert not torch.equal(one, keyed_noise((3, 4), 1, "b"))
