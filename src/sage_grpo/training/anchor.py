"""Copies of the trainable weights that can stand in for them: the anchor of the trust region, the EMA, and the old policy.

Never a second model: a copy is swapped in for the reference pass, one parameter (or shard) at a time, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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


def state_of(snapshot: Snapshot | None, prefix: str) -> dict[str, Tensor]:
    """The copies as flat tensors of a checkpoint."""
    return {} if snapshot is None else {f"{prefix}/{name}": copy for name, copy in snapshot.copies.items()}
