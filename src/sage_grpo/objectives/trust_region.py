"""KL penalties between two policies at the same x, and the dual trust region made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sage_grpo.config.ranges import NotNegative, checked
from sage_grpo.samplers.transition import expanded

Mode = Literal["none", "fixed", "stepwise", "moving", "dual", "fixed_dual"]


def closed_form_kl(v: Tensor, v_ref: Tensor, sensitivity: Tensor) -> Tensor:
    """KL per dimension = 1/2 sensitivity^2 mean((v - v_ref)^2), per sample (and step): affine Gaussians with the same std differ by b (v - v_ref)."""
    if v.shape != v_ref.shape:
        raise ValueError(
            f"v has shape {tuple(v.shape)} but v_ref has {tuple(v_ref.shape)}: compare them at the same x."
        )
    # float32 whatever the network runs in: a bf16 mean of squares would lose most of its digits.
    difference = (v.to(torch.float32) - v_ref.to(torch.float32)).flatten(max(1, sensitivity.ndim))
    return 0.5 * sensitivity.to(v.device, torch.float32).square() * difference.square().mean(-1)


@dataclass(frozen=True)
class KlTerms:
    """Penalties per sample; a term that the mode does not use is None."""

    position: Tensor | None
    velocity: Tensor | None
    total: Tensor | None
    """The weighted sum, before the coefficient lambda; None for mode 'none'."""


@checked
class TrustRegion:
    """KL terms of the loss."""

    mode: Mode = "dual"
    """none, fixed (initial policy), stepwise (rollout's), moving (renewed anchor), dual (moving + stepwise), fixed_dual."""
    beta_position: NotNegative = 1.0
    """Weight of the anchor term."""
    beta_velocity: NotNegative = 0.1
    """Weight of the step-wise term in dual and fixed_dual."""

    @property
    def uses_anchor(self) -> bool:
        return self.mode in ("fixed", "moving", "dual", "fixed_dual")

    @property
    def renews_anchor(self) -> bool:
        return self.mode in ("moving", "dual")

    @property
    def uses_stepwise(self) -> bool:
        return self.mode in ("stepwise", "dual", "fixed_dual")

    def penalty(self, *, v: Tensor, v_old: Tensor, v_reference: Tensor, sensitivity: Tensor, clips: int) -> KlTerms:
        """The terms at one step, one value per clip; equally many may share a velocity. The loss is surrogate PLUS lambda times `total`."""
        position = velocity = None
        if self.uses_anchor:
            position = self.beta_position * expanded(closed_form_kl(v, v_reference, sensitivity), clips)
        if self.uses_stepwise:
            weight = 1.0 if self.mode == "stepwise" else self.beta_velocity
            velocity = weight * expanded(closed_form_kl(v, v_old, sensitivity), clips)
        if position is None or velocity is None:
            return KlTerms(position, velocity, position if velocity is None else velocity)
        return KlTerms(position, velocity, position + velocity)
