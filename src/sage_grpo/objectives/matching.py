"""Losses of clips that are noised again: DiffusionNFT's positive and negative velocities (arXiv 2509.16117), and the weighting that the authors of
advantage-weighted matching run (arXiv 2509.25050), by which large errors count less."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sage_grpo.objectives.objective import Weighting
from sage_grpo.objectives.surrogate import SurrogateTerms

SMALLEST = 1e-5
"""The mean absolute error that an adaptive weight divides by is at least this."""


def optimality(advantage: Tensor, *, saturation: float = 1.0) -> Tensor:
    """r = 1/2 + clip(A / saturation, -1, 1) / 2: how good a clip is, from 0 to 1."""
    return 0.5 + 0.5 * (advantage / saturation).clamp(-1.0, 1.0)


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    target: Tensor,
    r: Tensor,
    *,
    beta: float,
    sigma: float,
    weight: Weighting = "uniform",
    saturation: float = 1.0,
) -> SurrogateTerms:
    """s (r w+ |v+ - u|^2 + (1 - r) w- |v- - u|^2) / beta, a mean over dimensions; u = eps - x0 is the target, s the saturation of r.

    v+ = (1 - beta) v_old + beta v and v- = (1 + beta) v_old - beta v. With equal weights that is, but for a constant,
    2 s (2 r - 1) (v_old - u) (v - v_old) + s beta |v - v_old|^2: a step along the advantage, which is s (2 r - 1), and a penalty on
    the distance to the old policy. The factor s / beta makes the first, and so the learning rate, mean the same for every beta and saturation.
    """
    positive = (1.0 - beta) * v_old + beta * v - target
    negative = (1.0 + beta) * v_old - beta * v - target
    loss = (r * _error(positive, sigma, weight) + (1.0 - r) * _error(negative, sigma, weight)) / beta
    return SurrogateTerms(loss=saturation * loss, ratio=None, inactive=torch.zeros_like(r, dtype=torch.bool))


def _error(difference: Tensor, sigma: float, weight: Weighting) -> Tensor:
    """The weighted mean square of every sample."""
    rows = difference.flatten(1)
    square = rows.square().mean(1)
    if weight == "adaptive":
        return sigma * square / rows.detach().abs().mean(1).clamp(min=SMALLEST)
    return sigma * square if weight == "sigma" else square


POWER = 0.25
"""The mean squared error is taken to this power, as in all of their released configurations."""
TINY = 1e-10
"""Added to the mean squared error: its root has no slope at 0."""


def ghuber_log_prob(v: Tensor, target: Tensor, *, sigma: float) -> Tensor:
    """log p = -(sigma / p) ((E + e)^p - e^p) per sample, with E the mean square of v - target over dimensions.

    Its slope is sigma (E + e)^(p - 1) times that of -E: for p = 1 it is the weight sigma of the matching law. It is not
    the density of a Gaussian, so the KL remains that of weight 1, the mean square of the difference of two velocities.
    """
    error = (v - target).square().flatten(1).mean(1)
    return -(sigma / POWER) * ((error + TINY).pow(POWER) - math.pow(TINY, POWER))
