"""The convention is consistent with itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import law
from sage_grpo.flow.path import interpolate, velocity


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
