"""Which updates need the anchor's velocities, and which can do without the pass that computes them.

Two kinds of updates can. Right after a renewal the anchor's weights are the live ones: its velocities are those of the replay, to the bit.
And where `anchor.skip_below` allows it, a KL whose share of the gradient was measured to be far too small to act: there the weights
change, by about that share of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from sage_grpo.training.anchor import Anchor
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.update import Item, with_anchor

Need = Literal["none", "pass", "live", "inert"]
"""No anchor; run the reference pass; the anchor is the live policy; its KL is inert."""
REST = 4
"""After a stretch of measured updates, so many stretches are left out at most."""
MARGIN = 1.0 + REST
"""How much the share may grow until it is measured again: its gradient is proportional to the way from the anchor, and that to the updates."""
UNMEASURED = ("kl/total", "kl/position", "loss/kl", "gradient/kl_share")
"""Metrics that an update without the anchor's velocities cannot tell."""


class Reference:
    """Measures the KL over one stretch of updates (from one renewal of the anchor to the next), then may let it rest for a few.

    The share of the KL's gradient is proportional to lambda, so that `peak`, the largest share per lambda, holds while lambda moves. All
    that it goes by is the same on every rank and part of the training state.
    """

    def __init__(self, *, limit: float = 0.0, stretch: int = 1) -> None:
        self.limit, self.stretch = limit, stretch
        self.measured, self.peak, self.rest = 0, 0.0, 0

    @classmethod
    def of(cls, config: TrainConfig) -> Reference:
        """The one of a run. Coefficients that follow the KL need it in every update."""
        blind = config.kl.kind in ("constant", "two_stage")
        return cls(limit=config.anchor.skip_below if blind else 0.0, stretch=config.anchor.every)

    def needs(self, anchor: Anchor | None, updates: int, count: int, kl_lambda: float) -> list[Need]:
        """What each of the next `count` updates needs, where `updates` have been done."""
        if anchor is None:
            return ["none"] * count
        rest: Need = "inert" if self.rest > 0 and self._inert(kl_lambda) else "pass"
        return ["live" if anchor.is_live(updates, later) else rest for later in range(count)]

    def note(self, metrics: dict[str, float], need: Need) -> dict[str, float]:
        """Count one update; returns its metrics without those that it could not measure."""
        if need == "none" or self.limit == 0:
            return metrics
        kl_lambda = metrics["kl/lambda"]
        if need == "inert":
            metrics = {name: value for name, value in metrics.items() if name not in UNMEASURED}
        if self.rest > 0 and self._inert(kl_lambda):
            self.rest -= 1
        elif need == "pass":  # at its anchor the policy has no KL, which says nothing about it
            self._measure(metrics["gradient/kl_share"], kl_lambda)
        return {**metrics, "kl/skipped": float(need == "inert")}

    def _measure(self, share: float, kl_lambda: float) -> None:
        if self.rest > 0 or self.measured == self.stretch:  # lambda has outgrown what was measured, or the rest is over
            self.measured, self.peak, self.rest = 0, 0.0, 0
        odds = share / (1.0 - share) if share < 1.0 else float("inf")
        self.peak = max(self.peak, odds / kl_lambda if kl_lambda > 0 else 0.0)
        self.measured += 1
        if self.measured == self.stretch and self._inert(kl_lambda):
            self.rest = REST * self.stretch

    def _inert(self, kl_lambda: float) -> bool:
        return MARGIN * self.peak * kl_lambda < self.limit

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"measured": self.measured, "peak": self.peak, "rest": self.rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; a checkpoint without one begins to measure."""
        self.measured, self.rest = int(state.get("measured", 0)), int(state.get("rest", 0))
        self.peak = float(state.get("peak", 0.0))


def anchored(
    items: list[Item], need: Need, anchor: Anchor, device: torch.device, progress: Callable[[], None]
) -> list[Item]:
    """Items with the anchor's velocities, or marked `at_anchor` where the live velocities are used instead."""
    if need != "pass":
        return [dataclasses.replace(item, at_anchor=True) for item in items]
    with anchor.applied():
        return with_anchor(items, device, progress)
