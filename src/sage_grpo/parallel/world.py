"""The processes of a run, seen from one of them. One process is the same code with nothing to exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Data-parallel rank and size; every method is called by all ranks or by none."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the terminal."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate a tensor of rows (of any number per rank) over all ranks, in rank order."""
        if self.size == 1:
            return values
        parts: list[Tensor | None] = [None] * self.size
        dist.all_gather_object(parts, values.cpu(), group=self.group)
        return torch.cat([part for part in parts if part is not None])

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over all ranks."""
        if self.size == 1:
            return values
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.group)
