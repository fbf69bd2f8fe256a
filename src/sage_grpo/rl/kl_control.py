"""The KL coefficient lambda, counted in optimizer updates and part of the training state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sage_grpo.ranges import Count, Natural, NotNegative, Positive, check

Kind = Literal["constant", "two_stage", "paper", "ppo"]


@dataclass(frozen=True, kw_only=True)
class KlCoefficient:
    """How lambda moves."""

    kind: Kind = "two_stage"
    """constant (lambda_max); two_stage (a ramp); paper (ramp, then Eq. 42: relaxes when KL is high); ppo (ramp, then tightens)."""
    lambda_min: NotNegative = 1e-7
    """Start of the ramp and lower clamp."""
    lambda_max: NotNegative = 1e-5
    """End of the ramp and upper clamp."""
    warmup_updates: Natural = 100
    """Optimizer updates that the ramp takes (Eq. 41)."""
    target: Positive = 1e-4
    """The KL that the feedback compares with; the paper gives no value."""
    window: Count = 10
    """How many of the last KLs the feedback averages."""

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "two_stage", "paper", "ppo"):
            raise ValueError(f"kind must be constant, two_stage, paper or ppo, got {self.kind!r}.")
        check(self)
        if self.lambda_min > self.lambda_max:
            raise ValueError(f"kl.lambda_min must be at most kl.lambda_max ({self.lambda_max}), got {self.lambda_min}.")

    def controller(self) -> KlController:
        """A controller at its start."""
        return KlController(self)


class KlController:
    """Holds lambda; `observe` is called once per optimizer update with the same KL on every rank."""

    def __init__(self, config: KlCoefficient) -> None:
        self.config = config
        self.updates = 0
        self.history: list[float] = []
        self.value = self._ramp()

    def observe(self, kl: float) -> float:
        """Count one optimizer update with this (unweighted) KL; returns the lambda of the next one."""
        if not math.isfinite(kl):
            raise ValueError(f"The KL of update {self.updates} is {kl}: stop and look at the loss before going on.")
        self.updates += 1
        self.history = [*self.history, float(kl)][-self.config.window :]
        if self.config.kind in ("paper", "ppo") and self.updates > self.config.warmup_updates:
            self.value = self._feedback()
        else:
            self.value = self._ramp()
        return self.value

    def _ramp(self) -> float:
        c = self.config
        if c.kind == "constant" or self.updates >= c.warmup_updates:
            return c.lambda_max
        return c.lambda_min + (c.lambda_max - c.lambda_min) * self.updates / c.warmup_updates

    def _feedback(self) -> float:
        c = self.config
        mean = sum(self.history) / len(self.history)
        tighten, relax = 1.1, 0.9
        # The paper's Eq. 42 relaxes the leash when KL is high, the opposite of PPO, and so never reaches its target.
        when_high, when_low = (relax, tighten) if c.kind == "paper" else (tighten, relax)
        factor = when_high if mean > 1.5 * c.target else when_low if mean < 0.5 * c.target else 1.0
        return min(max(self.value * factor, c.lambda_min), c.lambda_max)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"updates": self.updates, "history": list(self.history), "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.updates, self.value = int(state["updates"]), float(state["value"])
        self.history = [float(kl) for kl in state["history"]]
