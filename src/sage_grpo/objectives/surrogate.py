"""Policy-gradient surrogates: tensors in, loss per (sample, step) and diagnostics out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAPER_CLIP = 0.076
"""The paper's clip range 1e-4 at D = 576,576 latent dimensions, written as c / sqrt(D)."""


@dataclass(frozen=True)
class SurrogateTerms:
    """The loss of a surrogate, with diagnostics."""

    loss: Tensor
    """To be minimised, one value per (sample, step)."""
    ratio: Tensor | None
    """The (possibly centred) probability ratio, detached; None for a loss without one."""
    inactive: Tensor
    """bool; True where the trust region removes the gradient."""


def clip_range(dims: int, c: float = PAPER_CLIP) -> float:
    """c / sqrt(D): the noise of a log-ratio that is a mean over D dimensions falls as 1 / sqrt(D)."""
    if dims < 1 or c <= 0:
        raise ValueError(f"clip_range needs dims >= 1 and c > 0, got dims = {dims}, c = {c}.")
    return c / math.sqrt(dims)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, clip: float) -> SurrogateTerms:
    """PPO: -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A). (Schulman et al. 2017)"""
    if clip <= 0:
        raise ValueError(f"clip must be positive, got {clip}.")
    ratio = torch.exp(log_ratio)
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    inactive = ((ratio > 1.0 + clip) & (advantage > 0)) | ((ratio < 1.0 - clip) & (advantage < 0))
    return SurrogateTerms(loss=loss, ratio=ratio.detach(), inactive=inactive)


def scaled_surrogate(log_ratio: Tensor, advantage: Tensor, kl: Tensor, *, std: Tensor, clip: float) -> SurrogateTerms:
    """GRPO-Guard: PPO's clip on exp(std (log r + KL(old, new))), the KL with its gradient. (arXiv 2510.22319, as released)

    The plain ratio is wide at steps with little noise; the scaled one is as wide at every step, so that one clip range serves all.
    The loss is divided by std again: at ratio 1 its gradient is that of the plain ratio, and step weights stay independent of it.
    """
    # Ranges of 1e-6 are a few units of float32's last place at 1.
    scaled = std.double() * (log_ratio + kl).double()
    terms = clipped_surrogate(scaled, advantage.double(), clip=clip)
    return SurrogateTerms(loss=(terms.loss / std).to(log_ratio.dtype), ratio=terms.ratio, inactive=terms.inactive)


def kl_masked_surrogate(log_ratio: Tensor, advantage: Tensor, kl: Tensor, *, tau: float) -> SurrogateTerms:
    """Flow-DPPO: -ratio A, dropped where KL(old, new) >= tau AND the move is aggressive. (arXiv 2606.11025)"""
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}.")
    ratio = torch.exp(log_ratio)
    aggressive = ((ratio > 1.0) & (advantage > 0)) | ((ratio < 1.0) & (advantage < 0))
    inactive = (kl.detach() >= tau) & aggressive
    loss = torch.where(inactive, torch.zeros_like(ratio), -ratio * advantage)
    return SurrogateTerms(loss=loss, ratio=ratio.detach(), inactive=inactive)


def centred_log_ratio(log_ratio: Tensor, kl: Tensor) -> Tensor:
    """log r + KL(old, new): under the old policy E[log r] = -KL, so the plain ratio is biased below 1.

    The KL is a constant here: it removes the bias of the ratio and must not add a gradient of its own.
    """
    return log_ratio + kl.detach()
