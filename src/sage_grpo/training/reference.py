"""Snapshots of the trainable parameters: reference policy, moving average, weights before a rollout's updates; and the
choice of updates that run the reference pass."""

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
        """Copy the current weights."""
        for name, p in self.params.items():
            self.copies[name].copy_(p)

    @torch.no_grad()
    def take_back(self, kept: float) -> None:
        """Interpolate the live weights towards these copies, keeping the share `kept` of their distance."""
        for name, p in self.params.items():
            p.lerp_(self.copies[name].to(p), 1.0 - kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has these weights; the live ones are restored bit for bit, also after an error."""
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


class ReferencePolicy(Snapshot):
    """The reference policy of the position term: fixed, or renewed every `every` optimizer updates."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, every: int | None, offload: bool = False) -> None:
        super().__init__(params, offload=offload)
        self.every = every
        self.renewed_at = 0
        """Number of optimizer updates at the last renewal; negative if not known."""

    def is_live(self, updates: int, later: int = 0) -> bool:
        """True if the reference equals the live weights `later` updates after the first `updates`."""
        if later:
            return self.every is not None and (updates + later) % self.every == 0
        return self.renewed_at == updates

    def advance(self, updates: int) -> bool:
        """Called after optimizer update number `updates` (from 1); renews the copies when due and then returns True."""
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
        """Average with the current weights."""
        for name, p in self.params.items():
            self.copies[name].lerp_(p.detach().to(self.copies[name]), 1.0 - self.decay)


class OldPolicy(Snapshot):
    """The old policy of losses at fresh noise levels: the weights before a rollout's updates, or an average that lags behind."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], *, lags: bool, samples: bool = True, offload: bool = False
    ) -> None:
        super().__init__(params, offload=offload)
        self.lags = lags
        """True if it differs from the live weights between iterations; then it is part of the training state."""
        self.samples = samples
        """True if a lagging old policy samples the clips."""

    def begin(self) -> None:
        """Called before a rollout's updates."""
        if not self.lags:
            self.renew()

    @torch.no_grad()
    def end(self, decay: float) -> None:
        """Called after a rollout's updates: averages with the live weights; `decay` is the weight of the old ones."""
        for name, p in self.params.items() if self.lags else ():
            self.copies[name].lerp_(p.detach().to(self.copies[name]), 1.0 - decay)


class PastWeights:
    """The weights that sample later iterations (rollout.staleness). They are part of a checkpoint."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = dict(params)
        self.since: dict[int, int] = {}
        """By iteration, the iteration in which its weights were the newest."""
        self.weights: dict[int, Snapshot] = {}
        """Weights by that iteration."""

    def promise(self, due: int, coming: Sequence[int]) -> dict[int, tuple[int, Snapshot]]:
        """For the due iteration and for the coming ones: the iteration of their weights, and these weights. Iterations
        without assigned weights get the current ones."""
        wanted = (due, *coming)
        if any(n not in self.since for n in wanted):
            self.weights[due] = Snapshot(self.params, offload=True)
        self.since = {n: self.since.get(n, due) for n in wanted}
        found = {n: (since, self.weights[since]) for n, since in self.since.items()}
        del self.since[due]
        self.weights = {since: self.weights[since] for since in self.since.values()}
        return found

    def forget(self) -> None:
        """Discard all weights."""
        self.since, self.weights = {}, {}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return {
            f"past/{since}/{name}": copy for since, one in self.weights.items() for name, copy in one.copies.items()
        }

    def state_dict(self) -> dict[str, int]:
        """State without tensors."""
        return {str(n): since for n, since in self.since.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Allocate the weights of `state_dict` for loading `tensors`."""
        self.since = {int(n): int(since) for n, since in state.items()}
        self.weights = {since: Snapshot(self.params, offload=True) for since in self.since.values()}


Need = Literal["none", "pass", "live", "inert"]
"""Reference of an update: none; run the reference pass; the reference equals the live policy; its KL is negligible and
skipped."""
REST = 4
"""After a stretch of measured updates, the KL is skipped for at most this many stretches."""
MARGIN = 1.0 + REST
"""Growth of the share that is allowed until the next measurement: its gradient is proportional to the distance from the
reference, and that to the number of updates."""
UNMEASURED = ("kl/total", "kl/position", "loss/kl", "gradient/kl_share")
"""Metrics that are not known without the reference's velocities."""


class ReferenceKl:
    """Measures the KL over one stretch of updates (from one renewal of the reference to the next), then may skip it for
    a few.

    The KL's share of the gradient is proportional to lambda, so `peak`, the largest share per lambda, holds while
    lambda changes. All inputs of the decision are the same on every rank and part of the training state.
    """

    def __init__(self, *, limit: float = 0.0, stretch: int = 1) -> None:
        self.limit, self.stretch = limit, stretch
        self.measured, self.peak, self.rest = 0, 0.0, 0

    @classmethod
    def of(cls, config: TrainConfig) -> ReferenceKl:
        """Build it from a run's configuration. Coefficients that follow the KL need it in every update."""
        blind = config.kl.kind in ("constant", "two_stage")
        return cls(limit=config.anchor.skip_below if blind else 0.0, stretch=config.anchor.every)

    def needs(self, anchor: ReferencePolicy | None, updates: int, count: int, kl_lambda: float) -> list[Need]:
        """The reference that each of the next `count` updates needs after `updates` updates."""
        if anchor is None:
            return ["none"] * count
        rest: Need = "inert" if self.rest > 0 and self._inert(kl_lambda) else "pass"
        return ["live" if anchor.is_live(updates, later) else rest for later in range(count)]

    def note(self, metrics: dict[str, float], need: Need) -> dict[str, float]:
        """Count one update; returns its metrics without those that were not measured."""
        if need == "none" or self.limit == 0:
            return metrics
        kl_lambda = metrics["kl/lambda"]
        if need == "inert":
            metrics = {name: value for name, value in metrics.items() if name not in UNMEASURED}
        if self.rest > 0 and self._inert(kl_lambda):
            self.rest -= 1
        elif need == "pass":  # at the reference the KL is 0 by construction
            self._measure(metrics["gradient/kl_share"], kl_lambda)
        return {**metrics, "kl/skipped": float(need == "inert")}

    def _measure(self, share: float, kl_lambda: float) -> None:
        if self.rest > 0 or self.measured == self.stretch:  # lambda has outgrown the measurement, or the rest is over
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
