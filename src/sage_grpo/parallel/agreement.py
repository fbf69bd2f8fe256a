"""Whether processes hold the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sage_grpo.parallel.world import World


@torch.no_grad()
def disagreeing(tensors: Mapping[str, Tensor], world: World) -> list[int]:
    """The processes whose tensors are not those of the first; all of them call this. Shards are put together, one tensor at a time."""
    own = torch.tensor([_digest(tensor) for tensor in tensors.values()], dtype=torch.float64).reshape(1, -1)
    table = world.gather(own)
    return [number for number, row in enumerate(table) if not torch.equal(row, table[0])]


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensor: Tensor) -> list[float]:
    """Sum and sum of squares in float64: equal bits have equal ones, and a change of one value is not lost."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()
    return [float(whole.sum()), float(whole.square().sum())]
