"""KL penalties between two policies at the same x, the dual trust region made of them, and its coefficient lambda."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from sage_grpo.config.ranges import Count, Natural, NotNegative, Positive, Range, checked
from sage_grpo.samplers.transition import expanded

Mode = Literal["none", "fixed", "stepwise", "moving", "dual", "fixed_dual"]


def closed_form_kl(v: Tensor, v_ref: Tensor, sensitivity: Tensor) -> Tensor:
    """KL per dimension = 1/2 sensitivity^2 mean((v - v_ref)^2), one value per sample (and step, where `sensitivity` has both): affine Gaussians
    with the same a, b and std differ only by b (v - v_ref)."""
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
    """none, fixed (initial policy), stepwise (rollout's policy), moving (renewed anchor), dual (moving + stepwise),
    or fixed_dual."""
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
        """The terms at one step, one value per clip; equally many consecutive ones may share a velocity. The loss is surrogate PLUS lambda
        times `total`."""
        position = velocity = None
        if self.uses_anchor:
            position = self.beta_position * expanded(closed_form_kl(v, v_reference, sensitivity), clips)
        if self.uses_stepwise:
            weight = 1.0 if self.mode == "stepwise" else self.beta_velocity
            velocity = weight * expanded(closed_form_kl(v, v_old, sensitivity), clips)
        if position is None or velocity is None:
            return KlTerms(position, velocity, position if velocity is None else velocity)
        return KlTerms(position, velocity, position + velocity)


CoefficientKind = Literal["constant", "two_stage", "paper", "ppo", "share"]
SHARE_GAIN = 0.25
"""Part of a deviation (on a logarithmic scale) that one update corrects. Updates train different steps, whose KLs weigh differently:
lambda follows their mean."""
SHARE_STEP = 1.5
"""Lambda changes by at most this factor, up or down, from one update to the next."""


@checked
class KlCoefficient:
    """Coefficient of the KL terms."""

    kind: CoefficientKind = "two_stage"
    """constant, two_stage (a ramp), paper or ppo (ramp, then feedback), or share (a fixed share of the gradient)."""
    lambda_min: NotNegative = 1e-7
    """Start of the ramp, and lower limit."""
    lambda_max: NotNegative = 1e-5
    """End of the ramp, and upper limit."""
    warmup_updates: Natural = 100
    """Optimizer updates of the ramp."""
    target: Positive = 1e-4
    """KL that the feedback compares with; the paper gives no value."""
    window: Count = 10
    """KLs that the feedback averages."""
    share: Annotated[float, Range(0, 1, open_below=True, open_above=True)] = 0.05
    """kind share: the KL's share of the gradient (metric gradient/kl_share)."""
    lambda_cap: Positive = 1e4
    """kind share: upper limit of the coefficient."""

    def __post_init__(self) -> None:
        name = "lambda_cap" if self.kind == "share" else "lambda_max"
        if self.lambda_min > getattr(self, name):
            raise ValueError(f"kl.lambda_min must be at most kl.{name} ({getattr(self, name)}), got {self.lambda_min}.")


@dataclass
class KlController:
    """Holds lambda; `observe` is called once per optimizer update with the same values on every rank."""

    config: KlCoefficient
    updates: int = 0
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = self._clamped(1.0) if self.config.kind == "share" else self._ramp()

    def observe(self, kl: float, share: float = 0.0) -> float:
        """Count one optimizer update with this (unweighted) KL, whose gradient had this share; returns the lambda of the next one."""
        if not math.isfinite(kl):
            raise ValueError(f"The KL of update {self.updates} is {kl}: stop and look at the loss before going on.")
        self.updates += 1
        self.history = [*self.history, float(kl)][-self.config.window :]
        if self.config.kind == "share":
            self.value = self._followed(share)
        elif self.config.kind in ("paper", "ppo") and self.updates > self.config.warmup_updates:
            self.value = self._feedback()
        else:
            self.value = self._ramp()
        return self.value

    def _ramp(self) -> float:
        c = self.config
        if c.kind == "constant" or self.updates >= c.warmup_updates:
            return c.lambda_max
        return c.lambda_min + (c.lambda_max - c.lambda_min) * self.updates / c.warmup_updates

    def _followed(self, share: float) -> float:
        """The next lambda of kind share: the KL's gradient is linear in lambda, so its odds against the policy's grow as lambda does."""
        if share == 0.0:  # the policy is at its reference: the gradient is 0 for every lambda
            return self.value
        wanted = self.config.share / (1.0 - self.config.share)
        step = (wanted * (1.0 - share) / share) ** SHARE_GAIN
        return self._clamped(self.value * min(max(step, 1 / SHARE_STEP), SHARE_STEP))

    def _clamped(self, value: float) -> float:
        return min(max(value, self.config.lambda_min), self.config.lambda_cap)

    def _feedback(self) -> float:
        c = self.config
        mean = sum(self.history) / len(self.history)
        tighten, relax = 1.1, 0.9
        # The paper's Eq. 42 relaxes the penalty when KL is high, the opposite of PPO, and so never reaches its target.
        when_high, when_low = (relax, tighten) if c.kind == "paper" else (tighten, relax)
        factor = when_high if mean > 1.5 * c.target else when_low if mean < 0.5 * c.target else 1.0
        return min(max(self.value * factor, c.lambda_min), c.lambda_max)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "history": list(self.history), "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.value = int(state["updates"]), float(state["value"])
        self.history = [float(kl) for kl in state["history"]]
