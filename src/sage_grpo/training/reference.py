"""Snapshots of the trainable parameters: the anchor, the moving average, and the weights before a rollout's updates; and which updates need
the anchor's velocities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_grpo.training.config import TrainConfig


class Snapshot:
    """A copy of named parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, offload: bool = False) -> None:
        self.params = dict(params)
        self.copies = {
            name: p.detach().to("cpu", copy=True) if offload else p.detach().clone() for name, p in self.params.items()
        }

    @torch.no_grad()
    def renew(self) -> None:
        """Take the present weights."""
        for name, p in self.params.items():
            self.copies[name].copy_(p)

    @torch.no_grad()
    def take_back(self, kept: float) -> None:
        """Move the live weights back towards these copies: they keep the share `kept` of the distance that they had moved."""
        for name, p in self.params.items():
            p.lerp_(self.copies[name].to(p), 1.0 - kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the model with these weights; the live ones come back to the bit, also after an error."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self.params.items():
            live = p.detach().clone()
            p.copy_(self.copies[name])
            self.copies[name].copy_(live)


class Anchor(Snapshot):
    """The reference policy of the position term: fixed, or renewed every `every` optimizer updates."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, every: int | None, offload: bool = False) -> None:
        super().__init__(params, offload=offload)
        self.every = every
        self.renewed_at = 0
        """Optimizer updates that had been done at the last renewal; negative where that is not known."""

    def is_live(self, updates: int, later: int = 0) -> bool:
        """Whether its weights will be the live ones, `later` updates after the first `updates`."""
        if later:
            return self.every is not None and (updates + later) % self.every == 0
        return self.renewed_at == updates

    def advance(self, updates: int) -> bool:
        """Called after optimizer update number `updates` (from 1); renews when it is time, and says whether it did."""
        if self.every is None or updates % self.every:
            return False
        self.renew()
        self.renewed_at = updates
        return True


class Ema(Snapshot):
    """An exponential moving average of the weights."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, decay: float) -> None:
        super().__init__(params)
        self.decay = decay

    @torch.no_grad()
    def advance(self) -> None:
        """Move towards the present weights."""
        for name, p in self.params.items():
            self.copies[name].lerp_(p.detach().to(self.copies[name]), 1.0 - self.decay)


class Old(Snapshot):
    """The old policy of losses at fresh noise levels: the weights before a rollout's updates, or an average that lags behind."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], *, lags: bool, samples: bool = True, offload: bool = False
    ) -> None:
        super().__init__(params, offload=offload)
        self.lags = lags
        """Whether it differs from the live weights between iterations; then it is part of the training state."""
        self.samples = samples
        """Whether it makes the clips, where it lags."""

    def begin(self) -> None:
        """Before a rollout's updates."""
        if not self.lags:
            self.renew()

    @torch.no_grad()
    def end(self, decay: float) -> None:
        """After a rollout's updates: average with the live weights, of which the old ones count `decay`."""
        for name, p in self.params.items() if self.lags else ():
            self.copies[name].lerp_(p.detach().to(self.copies[name]), 1.0 - decay)


class Past:
    """The weights with which iterations that are still to come are sampled (rollout.staleness). They are part of a checkpoint."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = dict(params)
        self.since: dict[int, int] = {}
        """By iteration, the one before which its weights were the newest."""
        self.weights: dict[int, Snapshot] = {}
        """By that one."""

    def promise(self, due: int, coming: Sequence[int]) -> dict[int, tuple[int, Snapshot]]:
        """For the iteration that is due and for those that are coming: since when their weights are old, and these weights. What was not promised
        before gets those of now."""
        wanted = (due, *coming)
        if any(n not in self.since for n in wanted):
            self.weights[due] = Snapshot(self.params, offload=True)
        self.since = {n: self.since.get(n, due) for n in wanted}
        found = {n: (since, self.weights[since]) for n, since in self.since.items()}
        del self.since[due]
        self.weights = {since: self.weights[since] for since in self.since.values()}
        return found

    def forget(self) -> None:
        """The weights are given up."""
        self.since, self.weights = {}, {}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        return {
            f"past/{since}/{name}": copy for since, one in self.weights.items() for name, copy in one.copies.items()
        }

    def state_dict(self) -> dict[str, int]:
        """What is not a tensor."""
        return {str(n): since for n, since in self.since.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make room for what `state_dict` and `tensors` gave."""
        self.since = {int(n): int(since) for n, since in state.items()}
        self.weights = {since: Snapshot(self.params, offload=True) for since in self.since.values()}


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
        """Continue where `state_dict` was taken."""
        self.measured, self.peak, self.rest = int(state["measured"]), float(state["peak"]), int(state["rest"])
