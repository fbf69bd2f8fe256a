"""benchmarks/where.py: base and trained weights take turns within one rollout."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch

from sage_grpo.recipes import recipe
from sage_grpo.training.anchor import Snapshot
from sage_grpo.worlds.world import SHAPES


@pytest.fixture
def where(benchmark_module) -> ModuleType:
    """The benchmark."""
    return benchmark_module("where")


def test_every_pattern_comes_once(where) -> None:
    assert where.patterns(3) == ["bbb", "ttt", "btt", "bbt", "tbb", "ttb"]
    assert len(set(where.patterns(6))) == 12


def test_each_step_runs_with_the_weights_that_its_letter_names(where) -> None:
    spec = dataclasses.replace(recipe("shapes/branch").model, cache=None, options={"pad_text": 20})
    model = spec.load()
    texts = SHAPES.texts("heldout")[:2]
    base = Snapshot(model.trainable())
    before = where.sampled(model, base, "tt", texts)  # live weights are the base's
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.mul_(1.05)
    live = {name: p.detach().clone() for name, p in model.trainable().items()}
    clips = {pattern: where.sampled(model, base, pattern, texts) for pattern in ("bb", "tb", "bt", "tt")}
    assert torch.equal(clips["bb"], before)
    kinds = [clips["bb"], clips["tb"], clips["bt"], clips["tt"]]
    assert all(not torch.equal(one, other) for place, one in enumerate(kinds) for other in kinds[:place])
    assert all(torch.equal(p, live[name]) for name, p in model.trainable().items())
