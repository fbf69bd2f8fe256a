"""One step of any sampler: an affine Gaussian with three scalars."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.samplers.gaussian import Gaussian


@dataclass(frozen=True)
class Transition:
    """x_next ~ Normal(a x + b v, std^2).

    The three fields have one shape: a scalar, or one value per sample (and step). Sampling, log-probability, KL,
    equaliser and inspector all derive from them; a sampler is nothing more.
    """

    a: Tensor
    b: Tensor
    std: Tensor

    def __call__(self, x: Tensor, v: Tensor) -> Gaussian:
        """The distribution of x_next at x with velocity v, in float32 whatever the network ran in."""
        if x.shape != v.shape:
            raise ValueError(f"x has shape {tuple(x.shape)} but v has {tuple(v.shape)}: a velocity has its x's shape.")
        x, v = x.to(torch.float32), v.to(torch.float32)
        mean = _like(self.a, x) * x + _like(self.b, x) * v
        return Gaussian(mean, self.std.to(torch.float32), batch_ndim=max(1, self.std.ndim))

    @property
    def sensitivity(self) -> Tensor:
        """|b| / std: the size of d(log-prob)/dv up to a constant; infinite for a deterministic step."""
        return self.b.abs() / self.std


def _like(scalar: Tensor, x: Tensor) -> Tensor:
    """Broadcast a per-sample coefficient over latent dimensions (a true scalar may stay on the CPU)."""
    scalar = scalar.to(torch.float32)
    if scalar.ndim == 0:
        return scalar
    return scalar.to(x.device).reshape(scalar.shape + (1,) * (x.ndim - scalar.ndim))
