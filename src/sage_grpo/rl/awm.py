"""The weighting that the authors of advantage-weighted matching run (arXiv 2509.25050): large errors count less."""

from __future__ import annotations

import math

from torch import Tensor

POWER = 0.25
"""The mean squared error is taken to this power, as in all of their released configurations."""
SMALLEST = 1e-10
"""Added to the mean squared error: its root has no slope at 0."""


def ghuber_log_prob(v: Tensor, target: Tensor, *, sigma: float) -> Tensor:
    """log p = -(sigma / p) ((E + e)^p - e^p) per sample, with E the mean square of v - target over dimensions.

    Its slope is sigma (E + e)^(p - 1) times that of -E: for p = 1 it is the weight sigma of the matching law. It is the density of no
    Gaussian, so that a KL stays what it is for the weight 1, the mean square of the way between two velocities.
    """
    error = (v - target).square().flatten(1).mean(1)
    return -(sigma / POWER) * ((error + SMALLEST).pow(POWER) - math.pow(SMALLEST, POWER))
