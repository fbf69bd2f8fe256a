"""How far the weights are from where the run began, measured on a sample of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sage_grpo.parallel.fsdp import Engine
from sage_grpo.parallel.world import World

MOST = 1 << 18
"""Weights that each process keeps of the start: means over so many are exact to a fraction of a percent."""


class Travel:
    """Remembers every n-th trainable weight as the run begins. Nothing is saved: a continued run begins with the same weights."""

    def __init__(self, params: Mapping[str, nn.Parameter], engine: Engine) -> None:
        self.params, self.engine = dict(params), engine
        self.stride = -(-sum(engine.local(p).numel() for p in self.params.values()) // MOST) or 1
        self.start = self._sample()

    def measure(self, world: World) -> dict[str, float]:
        """Distance from the start relative to its norm, and the share of weights that are not what they were; the same on all ranks."""
        now = self._sample()
        sums = [(now - self.start).square().sum(), self.start.square().sum(), (now != self.start).sum()]
        apart, size, moved, count = world.sum(
            torch.stack([*(s.double() for s in sums), torch.tensor(float(len(now)))])
        ).tolist()
        return {"weights/distance": (apart / max(size, 1e-30)) ** 0.5, "weights/moved": moved / max(count, 1.0)}

    @torch.no_grad()
    def _sample(self) -> Tensor:
        parts = [self.engine.local(p).detach().flatten()[:: self.stride] for p in self.params.values()]
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat(parts).to("cpu", torch.float64)  # one copy: each would wait for the GPU
