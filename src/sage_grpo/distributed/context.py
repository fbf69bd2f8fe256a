"""Sequence parallelism (Ulysses): the tokens of one clip are split over ranks; attention trades tokens for heads.

Everything but attention acts on single tokens, so each rank runs it on its own part. For attention an all-to-all gives each
rank all tokens of some heads, and another one takes the result back. Attention does not care about the order of tokens, so text
and video tokens are split alike and no token needs padding: counts may differ by one between ranks.

A tensor that all ranks of the group have (weights, text, time) gets on each rank the part of its gradient that came through this rank's
tokens. The sum over ranks is the gradient; FSDP adds it up with that of the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage_grpo.distributed.spec import ParallelError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each batch x tokens x heads x channels, to the same shape."""


class SequenceParallel:
    """This rank's part of every clip's tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def check(self, heads: int) -> None:
        if heads % self.size:
            fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise ParallelError(
                f"parallel.sp = {self.size} does not divide the {heads} attention heads: use one of {fitting}."
            )

    def counts(self, total: int) -> list[int]:
        return [stop - start for start, stop in pairwise(total * rank // self.size for rank in range(self.size + 1))]

    def split(self, tokens: Tensor, dim: int = 1) -> Tensor:
        counts = self.counts(tokens.shape[dim])
        return tokens.narrow(dim, sum(counts[: self.rank]), counts[self.rank])

    def merge(self, tokens: Tensor, total: int) -> Tensor:
        """All tokens (batch x tokens x channels) from every rank's, for a loss that every rank computes alike."""
        merged = _Merge.apply(tokens.transpose(0, 1), self.counts(total), self.group)  # type: ignore[no-untyped-call]
        return merged.transpose(0, 1)

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, counts: list[int]) -> Tensor:
        """Attention over the tokens of all ranks for this rank's; batch x tokens x heads x channels. `counts` are the tokens of every rank."""
        batch, tokens, heads, channels = query.shape
        query, key = query.to(value.dtype), key.to(value.dtype)
        everyone = self._deal(torch.cat([query, key, value], dim=-1), counts).split(channels, dim=-1)
        back = self._exchange(attention(*everyone).transpose(0, 1), counts, [tokens] * self.size)
        back = back.unflatten(0, (self.size, tokens)).permute(2, 1, 0, 3, 4)
        return back.reshape(batch, tokens, heads, channels)

    def _deal(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """All ranks' tokens of this rank's heads, from this rank's tokens of all heads."""
        # (rank, token) x batch x heads of that rank x channels: consecutive rows go to one rank.
        rows = tokens.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)
        return self._exchange(rows, [tokens.shape[1]] * self.size, counts).transpose(0, 1)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send consecutive rows to the ranks, `sent[r]` of them to rank r; returns theirs in rank order."""
        return _Exchange.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]


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


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.bounds = (sum(counts[:rank]), sum(counts[: rank + 1]))
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
