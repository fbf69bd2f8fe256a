"""Who holds which rollout, and which steps go to which update."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sage_grpo.data.groups import Member, deal, split_updates


@settings(max_examples=40)
@given(groups=st.integers(1, 7), size=st.integers(2, 6), micro=st.integers(1, 5), world=st.integers(1, 9))
@example(groups=3, size=2, micro=3, world=2)
def test_every_rollout_is_dealt_exactly_once_in_equal_rounds(groups: int, size: int, micro: int, world: int) -> None:
    total = groups * size
    if world > total:
        with pytest.raises(ValueError, match=f"at most {total} ranks"):
            deal(groups, size, micro, world_size=world)
        return
    shares = deal(groups, size, micro, world_size=world)
    assert len(shares) == world
    real = [member for share in shares for batch in share if not batch.filler for member in batch.members]
    assert Counter(real) == Counter(Member(g, i) for g in range(groups) for i in range(size))
    # Sharded networks talk in every forward pass: all ranks run the same number of micro-batches, and a micro-batch is one
    # pass, because its prompts have one length.
    dealt = [[batch for batch in share if not batch.filler] for share in shares]
    assert {len(share) for share in shares} == {max(map(len, dealt))}  # fillers only where a rank has less to do
    for batches in dealt:
        held = [member for batch in batches for member in batch.members]
        assert len(held) in (total // world, math.ceil(total / world))
        assert all(1 <= len(batch.members) <= micro for batch in batches)
        assert world == 1 or all(len({member.group for member in batch.members}) == 1 for batch in batches)
        pieces = Counter(member.group for member in held).values() if world > 1 else [len(held)]
        assert len(batches) == sum(math.ceil(piece / micro) for piece in pieces)  # as few as possible


@settings(max_examples=40)
@given(steps=st.lists(st.integers(0, 99), min_size=1, max_size=30, unique=True), updates=st.integers(1, 30))
@example(list(range(8)), 3)
def test_steps_are_dealt_out_evenly_and_in_order(steps: list[int], updates: int) -> None:
    if updates > len(steps):
        with pytest.raises(ValueError, match="use fewer updates"):
            split_updates(steps, updates)
        return
    parts = split_updates(steps, updates)
    assert [step for part in parts for step in part] == steps
    assert len(parts) == updates
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert min(map(len, parts)) >= 1
