"""The policy gradient on steps that explored: PPO's clip (Schulman et al. 2017), Flow-DPPO's mask on the exact KL (arXiv 2606.11025), and the
centered ratios of GRPO-Guard (arXiv 2510.22319); with the temporal gradient equalizer of SAGE-GRPO (arXiv 2603.21872, Eq. 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.objectives.base import LossTerms, Objective, ReplayedStep
from sage_grpo.objectives.options import SurrogateConfig


@dataclass(frozen=True)
class PolicyGradient(Objective):
    """-A times the ratio of the step's probabilities under the policy and under that of the rollout, clipped or masked."""

    def loss(self, step: ReplayedStep) -> LossTerms:
        return surrogate_loss(self.surrogate, step, self.clip_range(step.dims))

    def metrics(self, step: ReplayedStep) -> Mapping[str, Tensor]:
        """flow_grpo's approx_kl and clipfrac, which counts ratios outside the range whatever the sign of the advantage."""
        log_ratio = (step.log_prob - step.log_prob_old).detach()
        found = {"approx_kl": 0.5 * log_ratio.square()}
        if self.surrogate.kind == "clipped" and not self.surrogate.centred:
            found["clipfrac"] = ((log_ratio.exp() - 1.0).abs() > self.clip_range(step.dims)).to(torch.float32)
        return found


def surrogate_loss(config: SurrogateConfig, step: ReplayedStep, clip: float) -> LossTerms:
    log_ratio, kl = step.log_prob - step.log_prob_old, step.kl_old
    if config.centred == "scaled" and kl is not None:
        return scaled_surrogate(log_ratio, step.advantage, kl, std=step.std, clip=clip)
    if config.centred and kl is not None:
        log_ratio = centred_log_ratio(log_ratio, kl)
    if config.kind == "kl_mask" and kl is not None:
        return kl_masked_surrogate(log_ratio, step.advantage, kl, tau=config.kl_mask_scale / step.dims)
    return clipped_surrogate(log_ratio, step.advantage, clip=clip)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, clip: float) -> LossTerms:
    """PPO: -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A). (Schulman et al. 2017)"""
    ratio = torch.exp(log_ratio)
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    inactive = ((ratio > 1.0 + clip) & (advantage > 0)) | ((ratio < 1.0 - clip) & (advantage < 0))
    return LossTerms(loss=loss, ratio=ratio.detach(), inactive=inactive)


def scaled_surrogate(log_ratio: Tensor, advantage: Tensor, kl: Tensor, *, std: Tensor, clip: float) -> LossTerms:
    """GRPO-Guard: PPO's clip on exp(std (log r + KL(old, new))), the KL with its gradient. (arXiv 2510.22319, as released)

    The scaled ratio is as wide at every step. The loss is divided by std again: at ratio 1 its gradient is that of the plain ratio.
    """
    # Ranges of 1e-6 are a few units of float32's last place at 1.
    scaled = std.double() * (log_ratio + kl).double()
    terms = clipped_surrogate(scaled, advantage.double(), clip=clip)
    return LossTerms(loss=(terms.loss / std).to(log_ratio.dtype), ratio=terms.ratio, inactive=terms.inactive)


def kl_masked_surrogate(log_ratio: Tensor, advantage: Tensor, kl: Tensor, *, tau: float) -> LossTerms:
    """Flow-DPPO: -ratio A, dropped where KL(old, new) >= tau AND the move is aggressive. (arXiv 2606.11025)"""
    ratio = torch.exp(log_ratio)
    aggressive = ((ratio > 1.0) & (advantage > 0)) | ((ratio < 1.0) & (advantage < 0))
    inactive = (kl.detach() >= tau) & aggressive
    loss = torch.where(inactive, torch.zeros_like(ratio), -ratio * advantage)
    return LossTerms(loss=loss, ratio=ratio.detach(), inactive=inactive)


def centred_log_ratio(log_ratio: Tensor, kl: Tensor) -> Tensor:
    """log r + KL(old, new), the KL as a constant: under the old policy E[log r] = -KL, so the plain ratio is biased below 1."""
    return log_ratio + kl.detach()


def equalizing_weights(sensitivity: Tensor, *, cap: float | None = None) -> Tensor:
    """S_t = median over trained steps(sensitivity) / sensitivity_t, for the surrogate only. (paper Eq. 9, with |b| / std for N_t)"""
    exact = sensitivity.to(torch.float64)
    weights = torch.quantile(exact, 0.5) / exact
    return (weights if cap is None else weights.clamp(max=cap)).to(torch.float32)
