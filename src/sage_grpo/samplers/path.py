"""The conventions of the flow path.

`sigma` in [0, 1]: 1 is pure noise, 0 is data. Sampling goes from 1 down to 0, a step goes sigma -> sigma_next with
sigma_next < sigma.

    x     = (1 - sigma) x0 + sigma eps
    v     = eps - x0 = dx/dsigma             (the prediction of diffusers' flow models)
    x0    = x - sigma v
    eps   = x + (1 - sigma) v
    score = -eps / sigma

Names everywhere: x, v, x0, eps, sigma; suffixes _next, _old, _anchor.
"""

from __future__ import annotations

from torch import Tensor


def interpolate(x0: Tensor, eps: Tensor, sigma: Tensor | float) -> Tensor:
    """The point of the straight path between data and noise."""
    return (1 - sigma) * x0 + sigma * eps


def velocity(x0: Tensor, eps: Tensor) -> Tensor:
    return eps - x0
