"""The transition of learning at a fresh noise level: a Gaussian like that of a step, over the velocity itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sage_grpo.samplers.kernels import Sigma
from sage_grpo.samplers.transition import Transition


@dataclass(frozen=True)
class Matching:
    """u ~ Normal(v, 1 / (2 w)) for the target u = eps - x0: log p(u) = -w mean((u - v)^2) + const, the flow-matching loss.

    So advantage-weighted matching (arXiv 2509.25050) is the surrogate on this law: its ratio, its clip, and a KL of
    w mean((v - v_ref)^2) follow from the three scalars as they do for a step.
    """

    by_sigma: bool = False
    """w = sigma instead of 1."""
    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        """The law at sigma; there is no next sigma, so `sigma_next` is ignored."""
        level = torch.as_tensor(sigma, dtype=torch.float32)
        weight = level if self.by_sigma else torch.ones_like(level)
        return Transition(a=torch.zeros_like(level), b=torch.ones_like(level), std=(2.0 * weight).rsqrt())
