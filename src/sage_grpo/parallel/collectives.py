"""Collectives with gradients, for tokens that are split over the ranks of a group.

The convention: a tensor that all ranks of the group have (weights, text, time) gets on each rank the part of its gradient that
came through this rank's tokens. The sum over ranks is the gradient; FSDP adds it up with that of the data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.arguments), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to the ranks, `sent[r]` of them to rank r; returns theirs in rank order."""
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        own = dist.get_rank(group)
        ctx.bounds = (sum(counts[:own]), sum(counts[: own + 1]))
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Every rank computes the same loss from the merged rows, so its gradient is already the whole one: summing over ranks
        # would count the loss once per rank.
        return gradient[slice(*ctx.bounds)], None, None


def merge(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, in rank order, on every rank, for a loss that every rank computes alike."""
    return _Merge.apply(rows, counts, group)  # type: ignore[no-untyped-call]
