"""How much blocks keep on a card, and the table of the document that says it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sage_grpo.plan.formulas import GIB, HUNYUAN15, RunShape, levels_within, memory


def test_the_documents_table_is_the_formulas(benchmark_module) -> None:
    assert benchmark_module("scale_table").tables() in (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


@pytest.mark.parametrize("gib", [20, 60, 139, 400])
def test_blocks_keep_as_much_as_fits(gib: int) -> None:
    job, room = RunShape(compiled=True), gib * GIB
    levels = levels_within(HUNYUAN15, job, room)
    assert sum(levels.values()) == HUNYUAN15.blocks

    def total(**counts: int) -> float:
        return memory(HUNYUAN15, dataclasses.replace(job, keep=tuple(counts.items()))).total

    if levels != {"input": HUNYUAN15.blocks}:
        assert total(**levels) <= room
    for more, less in (("all", "attention"), ("attention", "input")):
        if levels.get(less):  # one block more that keeps more would be too much
            other = {**levels, more: levels.get(more, 0) + 1, less: levels[less] - 1}
            assert total(**other) > room
    if gib == 400:
        assert levels == {"all": HUNYUAN15.blocks}
