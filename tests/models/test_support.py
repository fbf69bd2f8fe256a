"""The table of docs/models.md is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from sage_grpo.forecast.architecture import find_architecture
from sage_grpo.models.base import SplitsSequence, TakesPlaced
from sage_grpo.models.spec import FAMILIES, ModelSpec

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
KINDS = {
    "hunyuan15": ["hunyuan15_t2v", "hunyuan15_i2v"],
    "wan": ["wan_t2v", "wan_i2v", "wan22_t2v", "wan22_i2v", "wan_flf2v"],
    "ltx": ["ltx", "ltx_condition"],
    "ltx2": ["ltx2", "ltx2_3"],
    **{
        name: [name]
        for name in ("hunyuan", "sana_video", "flux", "flux2", "sd3", "qwen_image", "qwen_image_edit", "z_image")
    },
}
"""Checkpoints that show what a family does."""


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().split("## What is supported")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {name.strip("`"): rest for name, *rest in cells}


def test_every_family_has_a_row() -> None:
    assert list(rows()) == list(FAMILIES) == list(KINDS)
    assert {kind for kinds in KINDS.values() for kind in kinds} <= {
        *tiny.KINDS,
        *tiny.OTHERS,
        *tiny.SOUND,
        *tiny.EDITS,
        "wan_flf2v",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_says_what_the_code_does(family: str, checkpoint) -> None:
    text, pictures, clip, weights, experts, split, _, plan, _ = rows()[family]
    models = [find_architecture(ModelSpec(path=str(checkpoint(kind)))) for kind in KINDS[family]]
    own = [one.model for one in models if one.model is not None]
    assert len(own) == len(models)
    assert weights == "yes"
    assert (text == "yes") == any(not model.image_to_video for model in own)
    counts = {count for model in own if model.takes_images for count in model.pictures}
    words = {(): "no", (1,): "first frame" if text == "yes" else "to edit", (1, 2): "first frame, first and last"}
    anywhere = ", any place" if any(isinstance(model, TakesPlaced) for model in own) else ""
    assert pictures == words[tuple(sorted(counts))] + anywhere
    assert (clip != "no") == any({"strength", "denoise_strength"} & model.traits.options.keys() for model in own)
    assert (experts != "-") == any(model.experts.boundary is not None for model in own)
    assert (split == "yes") == all(isinstance(model, SplitsSequence) for model in own)
    assert plan == ("estimated" if any(one.estimated for one in models) else "yes")
