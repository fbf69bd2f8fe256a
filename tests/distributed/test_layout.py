"""Which process does what: arithmetic, and errors that name what works."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.distributed.spec import Layout, ParallelError, ParallelSpec, lay_out
from sage_grpo.distributed.world import World

FEW = settings(max_examples=30)


@FEW
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_layout_uses_every_process_once(replicate: int, shard: int, sp: int) -> None:
    layout = lay_out(ParallelSpec(dp_replicate=replicate, sp=sp), replicate * shard * sp)
    assert layout == Layout(replicate, shard, sp)
    assert layout == lay_out(ParallelSpec(dp_replicate=replicate, dp_shard=shard, sp=sp), replicate * shard * sp)
    assert (layout.data, layout.weight_shards) == (replicate * shard, shard * sp)
    worlds = [
        World(rank=r, size=layout.data, sequence_rank=s, layout=layout) for r in range(layout.data) for s in range(sp)
    ]
    assert [world.number for world in worlds] == list(range(layout.processes))
    assert sum(world.is_main for world in worlds) == 1


def test_an_impossible_number_of_processes_names_the_nearest() -> None:
    with pytest.raises(ParallelError, match=r"nearest numbers that can are 8 or 12"):
        lay_out(ParallelSpec(dp_replicate=2, sp=2), 10)
    with pytest.raises(ParallelError, match=r"nearest numbers that can are 4\."):
        lay_out(ParallelSpec(sp=4), 1)
    with pytest.raises(ParallelError, match="Start 8"):
        lay_out(ParallelSpec(dp_shard=4, sp=2), 4)
    with pytest.raises(ValueError, match="at least 1"):
        ParallelSpec(sp=0)


@FEW
@given(st.integers(0, 20), st.integers(1, 5))
def test_ranks_of_one_clip_share_the_scoring(count: int, sp: int) -> None:
    parts = [World(sequence_rank=rank, layout=Layout(sequence=sp)).mine(count) for rank in range(sp)]
    assert sorted(place for part in parts for place in part) == list(range(count))


def test_heads_that_cannot_be_dealt_out_name_the_sizes_that_can() -> None:
    split = object.__new__(SequenceParallel)
    split.size = 3
    split.check(6)
    with pytest.raises(ParallelError, match="does not divide the 4 attention heads: use one of 1, 2, 4"):
        split.check(4)
