"""The coefficient lambda of the KL terms: its options, and the controller that follows the KL of the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sage_grpo.config.ranges import Count, Natural, NotNegative, Positive, Range, checked

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
