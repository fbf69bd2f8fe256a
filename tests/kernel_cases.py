"""What the kernel tests share: grids, the Gaussian recursion, and hypothesis strategies."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from sage_grpo.samplers.kernels import Cps, Dance, Flow, Kernel, Linear, Ode, Sage, SageExact

ITO = (Flow, Linear, Dance, Sage)
COEFFICIENT_PRESERVING = (Cps, SageExact)
STOCHASTIC = ITO + COEFFICIENT_PRESERVING

law = settings(max_examples=100, deadline=None, derandomize=True)
"""Every property test: the same examples on every machine, and no clock."""
some = settings(law, max_examples=25)
"""For those whose examples take long."""


def grid(steps: int, shift: float = 1.0) -> Tensor:
    """An even grid from 1 to 0 bent by the shift, in float64 and without the package's own code."""
    even = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
    return (shift * even / (1 + (shift - 1) * even)).clamp(max=1.0)


def final_variance(kernel: Kernel, sigmas: Tensor, c: float) -> float:
    """Variance of the whole chain for data N(0, c), whose optimal velocity is linear in x."""
    variance = 1.0
    p = sigmas[:-1].double()
    step = kernel(p, sigmas[1:].double())
    # v = E[eps - x0 | x] = cov(eps - x0, x) / var(x) * x
    marginal, covariance = (1 - p) ** 2 * c + p**2, p - (1 - p) * c
    gains = (step.a * marginal + step.b * covariance) / marginal
    for gain, std in zip(gains.tolist(), step.std.tolist()):
        variance = gain**2 * variance + std**2
    return variance


@st.composite
def grids(draw: st.DrawFn, max_steps: int = 1000) -> Tensor:
    """A schedule as users make them (shifted), or any strictly decreasing row of sigmas; float32."""
    if draw(st.booleans()):
        sigmas = grid(draw(st.integers(1, max_steps)), draw(st.floats(0.1, 20.0)))
    else:
        values = draw(st.lists(st.floats(0.0, 1.0, width=32), min_size=2, max_size=40, unique=True))
        sigmas = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    sigmas = torch.unique_consecutive(sigmas.to(torch.float32))
    return sigmas if len(sigmas) > 1 else torch.tensor([1.0, 0.0])


@st.composite
def kernels(draw: st.DrawFn, types: tuple[type, ...] = (Ode, *STOCHASTIC), least_eta: float = 0.0) -> Kernel:
    """Any kernel, with eta in [least_eta, 2] (cps: at most 1)."""
    kind = draw(st.sampled_from(types))
    if kind is Ode:
        return Ode()
    return kind(eta=draw(st.floats(least_eta, 1.0 if kind is Cps else 2.0)))
