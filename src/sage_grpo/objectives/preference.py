"""Losses of clean clips that are noised again and were chosen: flow matching of the better ones, and the preference of one clip to another
(Diffusion-DPO, arXiv 2311.12908, on velocities as in Flow-DPO, arXiv 2501.13918)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sage_grpo.objectives.surrogate import SurrogateTerms


def excess_error(v: Tensor, v_ref: Tensor, target: Tensor) -> Tensor:
    """|v - u|^2 - |v_ref - u|^2 per sample, a mean over dimensions; u is the target. Negative where the policy predicts the clip better than
    the reference does. Written as a product, which is exactly 0 at the reference and loses no digits beside it."""
    return ((v - v_ref) * (v + v_ref - 2.0 * target)).flatten(1).mean(1)


def dpo_lead(excess: Tensor, rival: Tensor, side: Tensor, *, beta: float) -> Tensor:
    """The policy's preference for the better clip of each pair, in log-odds: beta / 2 (excess of the worse - excess of the better).

    `side` is 1 for a clip that is the better of its pair and -1 for the worse; `rival` is the other clip's excess error.
    """
    return 0.5 * beta * side * (rival - excess)


def dpo_loss(lead: Tensor) -> SurrogateTerms:
    """-log sigmoid(lead) per clip, where the rival's half of the lead is a constant.

    Both clips of a pair carry its loss, each with the gradient at its own velocity. Because the mean is taken over clips, each counts twice
    in the gradient and once in the value.
    """
    pair = F.softplus(-lead)
    return _terms(2.0 * pair - pair.detach())


def matching_loss(v: Tensor, target: Tensor, *, weight: float = 1.0) -> SurrogateTerms:
    """weight |v - u|^2 per sample, a mean over dimensions: flow matching."""
    return _terms(weight * (v - target).square().flatten(1).mean(1))


def _terms(loss: Tensor) -> SurrogateTerms:
    return SurrogateTerms(loss=loss, ratio=None, inactive=torch.zeros_like(loss, dtype=torch.bool))
