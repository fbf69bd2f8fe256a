"""The convention is consistent with itself, the law at a fresh level is the flow-matching loss, and noise goes by its key alone."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import law
from sage_grpo.flow.matching import Matching
from sage_grpo.flow.noise import keyed_noise, keyed_seed
from sage_grpo.flow.path import interpolate, velocity
from sage_grpo.rl.trust_region import closed_form_kl


@law
@given(sigma=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_a_velocity_gives_back_both_ends_of_its_path(sigma: float, seed: int) -> None:
    torch.manual_seed(seed)
    x0, eps = torch.randn(2, 5).double(), torch.randn(2, 5).double()
    x, v = interpolate(x0, eps, sigma), velocity(x0, eps)
    torch.testing.assert_close(x - sigma * v, x0)
    torch.testing.assert_close(x + (1 - sigma) * v, eps)


def test_velocity_is_the_derivative_of_the_path() -> None:
    x0, eps, sigma = torch.randn(4).double(), torch.randn(4).double(), torch.tensor(0.3).double()
    derivative = torch.autograd.functional.jacobian(lambda s: interpolate(x0, eps, s), sigma)
    torch.testing.assert_close(derivative, velocity(x0, eps))


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


def test_a_seed_is_the_upper_63_bits_of_a_hash_of_its_key() -> None:
    digest = hashlib.blake2b(b"7/3/noise", digest_size=8).digest()
    assert keyed_seed(7, 3, "noise") == int.from_bytes(digest, "little") // 2


def test_keys_differ_and_seeds_fit_a_generator() -> None:
    seeds = {keyed_seed(one, other) for one in range(20) for other in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_noise_goes_by_its_key() -> None:
    one = keyed_noise((3, 4), 1, "a")
    assert (one.shape, one.dtype) == ((3, 4), torch.float32)
    assert torch.equal(one, keyed_noise((3, 4), 1, "a"))
    assert not torch.equal(one, keyed_noise((3, 4), 1, "b"))
