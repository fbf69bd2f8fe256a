"""Schedules: shifts, strictness, and which steps explore; the path between noise and data; noise that goes by its key."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import grid, some
from sage_grpo.objectives.base import VelocityLaw
from sage_grpo.objectives.trust_region import closed_form_kl
from sage_grpo.samplers.noise import keyed_noise, keyed_seed
from sage_grpo.samplers.path import interpolate, velocity
from sage_grpo.samplers.schedule import Schedule


@some
@given(steps=st.integers(1, 1000), shift=st.floats(0.1, 20.0))
def test_a_shifted_schedule_goes_strictly_from_one_to_zero(steps: int, shift: float) -> None:
    schedule = Schedule.shifted(steps, shift)
    assert schedule.num_steps == steps
    assert schedule.sigmas.dtype == torch.float32
    assert float(schedule.sigmas[0]) == 1.0
    assert float(schedule.sigmas[-1]) == 0.0
    assert (schedule.sigmas.diff() < 0).all()
    torch.testing.assert_close(schedule.sigmas, grid(steps, shift).float(), rtol=1e-6, atol=1e-7)


def test_pair_and_pairs_agree() -> None:
    schedule = Schedule.shifted(5, 3.0)
    p, q = schedule.sigmas[:-1], schedule.sigmas[1:]
    for index in range(5):
        assert schedule.pair(index) == (p[index], q[index])
    for index in (-1, 5):
        with pytest.raises(IndexError, match="steps 0 to 4"):
            schedule.pair(index)


def test_the_last_step_is_made_deterministic_only_if_it_ends_in_data() -> None:
    schedule = Schedule.shifted(4)
    assert (schedule.sigmas.tolist(), schedule.stochastic) == ([1.0, 0.75, 0.5, 0.25, 0.0], (True,) * 4)
    assert schedule.exploring([False, False, False, True]).stochastic == (False, False, False, True)
    explored = schedule.exploring((True, False, True, True), deterministic_last=True)
    assert explored.stochastic == (True, False, True, False)
    assert torch.equal(explored.sigmas, schedule.sigmas)
    part = Schedule(torch.tensor([1.0, 0.5, 0.2]))
    assert part.exploring((True, True), deterministic_last=True).stochastic == (True, True)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0, 0.5, 0.5, 0.0], r"decrease strictly, but sigma\[1\] = 0\.5"),
        ([1.1, 0.5], r"must lie in \[0, 1\], got 0\.5 to 1\.1"),
        ([0.5, -0.1], r"must lie in \[0, 1\]"),
        ([math.nan, 0.1], r"must lie in \[0, 1\]"),
        ([1.0], "at least two sigmas"),
        ([[1.0, 0.0]], "at least two sigmas in one row"),
    ],
)
def test_bad_sigmas_are_refused(sigmas: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(torch.tensor(sigmas))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        Schedule.shifted(0)
    for shift in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="shift must be positive"):
            Schedule.shifted(4, shift)
    with pytest.raises(ValueError, match="2 stochastic flags for 3 steps"):
        Schedule(torch.tensor([1.0, 0.6, 0.3, 0.0]), (True, False))


@pytest.mark.parametrize("sigma", [0.125, 0.5, 1.0])
def test_a_velocity_gives_back_both_ends_of_its_path(sigma: float) -> None:
    x0, eps = torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0])
    x, v = interpolate(x0, eps, sigma), velocity(x0, eps)
    assert x.tolist() == [(1 - sigma) * 3 + sigma * 0.5, -(1 - sigma) + sigma * 2]
    assert v.tolist() == [-2.5, 3.0]
    assert torch.equal(x - sigma * v, x0)
    assert torch.equal(x + (1 - sigma) * v, eps)


def test_log_probability_and_kl_are_squared_errors() -> None:
    generator = torch.Generator().manual_seed(2)
    x, v, v_ref, target = (torch.randn(3, 4, 2, generator=generator) for _ in range(4))
    assert not VelocityLaw().leaves_noise
    law = VelocityLaw()(torch.tensor(0.3), torch.tensor(0.1))
    change = law(x, v).log_prob(target) - law(x, v_ref).log_prob(target)
    errors = [((target - one) ** 2).mean((1, 2)) for one in (v, v_ref)]
    torch.testing.assert_close(change, errors[1] - errors[0], atol=1e-6, rtol=1e-5)
    kl = ((v - v_ref) ** 2).mean((1, 2))
    torch.testing.assert_close(law(x, v).kl(law(x, v_ref)), kl)
    torch.testing.assert_close(closed_form_kl(v, v_ref, law.sensitivity), kl)


def test_noise_goes_by_its_key_whose_seed_is_the_upper_63_bits_of_a_hash() -> None:
    digest = hashlib.blake2b(b"7/3/noise", digest_size=8).digest()
    assert keyed_seed(7, 3, "noise") == int.from_bytes(digest, "little") // 2
    one = keyed_noise((3, 4), 1, "a")
    assert (one.shape, one.dtype) == ((3, 4), torch.float32)
    assert torch.equal(one, keyed_noise((3, 4), 1, "a"))
    assert not torch.equal(one, keyed_noise((3, 4), 1, "b"))
