"""Assignment of group members to ranks: pure arithmetic.

Clips are numbered group by group and dealt out as evenly as possible, so a group may span ranks and no divisibility rule ties prompts, group size
and world size together. Every rank gets the same number of micro-batches (a rank that has fewer repeats one as filler), because sharded networks
communicate in every forward pass; evaluation runs the fillers, and training leaves them out and pads its passes by training/lockstep.py. For the same reason a micro-batch of several ranks holds one group only: prompts of different lengths
would take a rank more than one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Annotated

from sage_grpo.config.metadata import Speed
from sage_grpo.config.ranges import Count, Range, checked


@checked
class BatchConfig:
    """Rollouts per iteration."""

    prompts: Count = 16
    """Prompts per iteration."""
    group_size: Annotated[int, Range(2)] = 4
    """Clips per prompt; advantages are relative to this group."""
    micro_batch: Speed[Count] = 1
    """Clips per network pass, in rollouts and updates; changes memory and speed only."""
    trained_fraction: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    """Share of each group that is trained: its best and worst clips, half each (sft: the best)."""

    @property
    def trained(self) -> int:
        return min(self.group_size, max(2, round(self.trained_fraction * self.group_size)))

    @property
    def pairs(self) -> int:
        return max(1, self.trained // 2)

    @property
    def best(self) -> int:
        return max(1, round(self.trained_fraction * self.group_size))


@dataclass(frozen=True)
class Member:
    """One clip of an iteration."""

    group: int  # index of its group within the iteration
    index: int  # index within the group


@dataclass(frozen=True)
class MicroBatch:
    """Clips that go through the network together, in rollout and in every update, so that the first replay's ratio is exactly 1."""

    members: tuple[Member, ...]
    filler: bool = False  # true for padding that keeps ranks synchronized: it counts in no statistic and has weight 0


def deal(
    num_groups: int, group_size: int, micro_batch: int, *, world_size: int, apart: bool = False
) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of every data-parallel rank; with `apart`, each holds one group only."""
    total = num_groups * group_size
    if world_size > total:
        raise ValueError(
            f"{world_size} data-parallel ranks cannot share {num_groups} prompts x {group_size} = {total} rollouts: "
            f"use at most {total} ranks, or at least {math.ceil(world_size / group_size)} prompts per iteration."
        )
    members = [Member(group, index) for group in range(num_groups) for index in range(group_size)]
    return share_out(members, micro_batch, world_size=world_size, apart=apart)


def share_out(
    members: list[Member], micro_batch: int, *, world_size: int = 1, apart: bool = False
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Consecutive, near-equal shares for the ranks, each in the same number of micro-batches."""
    bounds = [len(members) * rank // world_size for rank in range(world_size + 1)]
    # A rank without a share (fewer clips than ranks) gets a filler, to stay synchronized.
    shares = [members[start:stop] for start, stop in pairwise(bounds)]
    dealt: list[list[MicroBatch]] = []
    for share in shares:
        by_group = [list(some) for _, some in groupby(share, key=lambda member: member.group)]
        pieces = by_group if apart or world_size > 1 else [share]
        chunks = [tuple(piece[at : at + micro_batch]) for piece in pieces for at in range(0, len(piece), micro_batch)]
        dealt.append([MicroBatch(chunk) for chunk in chunks])
    rounds = max(map(len, dealt))
    for batches in dealt:
        filler = MicroBatch(batches[-1].members if batches else tuple(members[:1]), filler=True)
        batches += [filler] * (rounds - len(batches))
    return tuple(map(tuple, dealt))


def split_updates(steps: list[int], updates: int) -> list[list[int]]:
    """Deal the trained steps, already in their permuted order, into `updates` near-equal consecutive parts. Steps are dealt out, not clips: every
    update sees every group, and the parts do not depend on ranks or batches."""
    if not 1 <= updates <= len(steps):
        raise ValueError(
            f"updates_per_rollout = {updates}, but a rollout has {len(steps)} trained steps to deal out to them: "
            "use fewer updates, or train more steps (rollout.steps, update.step_fraction, rollout.window)."
        )
    bounds = [len(steps) * part // updates for part in range(updates + 1)]
    return [steps[start:stop] for start, stop in pairwise(bounds)]
