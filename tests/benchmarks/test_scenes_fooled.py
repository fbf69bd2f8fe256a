"""benchmarks/scenes_fooled.py: what nobody looks at costs nothing, and the judge sees it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sage_grpo.worlds.scenes.learned import LearnedReward, Scorer, ScorerConfig, save_scorer
from sage_grpo.worlds.world import SCENES


@pytest.fixture
def fooled(benchmark_module) -> ModuleType:
    """The benchmark."""
    return benchmark_module("scenes_fooled")


def test_each_treatment_exaggerates_one_thing(fooled) -> None:
    clips = torch.randint(256, (2, 17, 32, 32, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = dict(fooled.treated(clips, [0, 8, 16], (0.5, 1.0)))
    assert next(iter(found)) == "clean"
    assert torch.equal(found["clean"], clips)
    spread = {name: float((videos.amax(-1) - videos.amin(-1)).float().mean()) for name, videos in found.items()}
    assert spread["clean"] < spread["too_colourful 0.5"] < spread["too_colourful 1"]
    assert torch.equal(found["too_fast 1"][:, 1], clips[:, 3])
    assert torch.equal(found["flashing 1"][:, ::2], clips[:, ::2])
    assert float(found["flashing 1"][:, 1::2].float().mean()) > float(clips[:, 1::2].float().mean()) + 20
    hidden = found["unseen frames black"]
    assert torch.equal(hidden[:, [0, 8, 16]], clips[:, [0, 8, 16]])
    assert int(hidden.sum()) == int(clips[:, [0, 8, 16]].sum())


def test_what_the_network_does_not_see_costs_it_nothing_and_the_truth_much(fooled, tmp_path) -> None:
    torch.manual_seed(0)
    save_scorer(Scorer(ScorerConfig(width=32, layers=1)), tmp_path)
    rows = fooled.measured(LearnedReward(checkpoint=str(tmp_path)), SCENES.texts("heldout")[:1], strengths=())
    clean, hidden = rows
    assert (clean["clips"], hidden["clips"]) == ("clean", "unseen frames black")
    assert hidden["learned"] == clean["learned"]
    assert hidden["true"] < 0.5 * clean["true"]
    assert not hidden["fooled"]  # it must gain, too
