"""Snapshots of the trainable parameters: reference policy, moving average, old policy, weights before a rollout's updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sage_grpo.config.metadata import Speed
from sage_grpo.config.ranges import Count, checked
from sage_grpo.objectives.base import Objective


@checked
class AnchorConfig:
    """Reference policy of the KL and of dpo."""

    every: Count = 10
    """Optimizer updates between renewals, in modes moving and dual."""
    offload: Speed[bool] = False
    """Keep the reference weights in CPU memory."""


class Snapshot:
    """A copy of named parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, offload: bool = False) -> None:
        self.params = dict(params)
        self.copies = {
            name: p.detach().to("cpu", copy=True) if offload else p.detach().clone() for name, p in self.params.items()
        }

    @torch.no_grad()
    def renew(self) -> None:
        for name, p in self.params.items():
            self.copies[name].copy_(p)

    @torch.no_grad()
    def take_back(self, kept: float) -> None:
        """Interpolate the live weights toward these copies, keeping the share `kept` of their distance."""
        for name, p in self.params.items():
            p.lerp_(self.copies[name].to(p), 1.0 - kept)

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Average with the live weights; `decay` is the weight of the copies."""
        for name, p in self.params.items():
            self.copies[name].lerp_(p.to(self.copies[name]), 1.0 - decay)

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
    """The reference policy of the position term and of dpo: fixed, or renewed every `every` optimizer updates."""

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

    def passes(self, updates: int, count: int) -> list[bool]:
        """For each of the next `count` updates True where it runs the reference: elsewhere the policy equals it, so the KL and its gradient are 0."""
        return [not self.is_live(updates, later) for later in range(count)]

    def advance(self, updates: int) -> bool:
        """Called after optimizer update number `updates` (from 1); renews the copies when due and then returns True."""
        if self.every is None or updates % self.every:
            return False
        self.renew()
        self.renewed_at = updates
        return True


class OldPolicy(Snapshot):
    """The old policy of losses at fresh noise levels: the weights before a rollout's updates, or an average that lags behind."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, lags: bool, samples: bool, offload: bool) -> None:
        super().__init__(params, offload=offload)
        self.lags = lags
        """True if it differs from the live weights between iterations; then it is part of the training state."""
        self.samples = samples

    @classmethod
    def of(
        cls, objective: Objective, params: Mapping[str, nn.Parameter], updates: int, offload: bool
    ) -> OldPolicy | None:
        """The old policy of an objective, if any of its updates runs one."""
        if not any(objective.old_passes(updates)):
            return None
        return cls(params, lags=objective.lags, samples=objective.spec.old_samples, offload=offload)

    def begin(self) -> None:
        if not self.lags:
            self.renew()


class PastWeights:
    """The weights that sample later iterations (rollout.staleness). They are part of a checkpoint."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = dict(params)
        self.since: dict[int, int] = {}
        self.weights: dict[int, Snapshot] = {}

    def promise(self, due: int, coming: Sequence[int]) -> dict[int, tuple[int, Snapshot]]:
        """For the due iteration and the coming ones: the iteration of their weights (the current one if none is assigned), and these weights."""
        wanted = (due, *coming)
        if any(n not in self.since for n in wanted):
            self.weights[due] = Snapshot(self.params, offload=True)
        self.since = {n: self.since.get(n, due) for n in wanted}
        weights = {n: (since, self.weights[since]) for n, since in self.since.items()}
        del self.since[due]
        self.weights = {since: self.weights[since] for since in self.since.values()}
        return weights

    def forget(self) -> None:
        self.since, self.weights = {}, {}

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"past/{since}/{name}": copy for since, one in self.weights.items() for name, copy in one.copies.items()
        }

    def state_dict(self) -> dict[str, int]:
        return {str(n): since for n, since in self.since.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Allocate the weights of `state_dict` for loading `tensors`."""
        self.since = {int(n): int(since) for n, since in state.items()}
        self.weights = {since: Snapshot(self.params, offload=True) for since in self.since.values()}
