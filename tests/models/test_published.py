"""Published checkpoints in tiny form: what docs/models.md says becomes of each, and that those which load sample as the stock pipeline does."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import test_families
import test_parity
import torch

import double
import tiny
from published import TABLE, Published
from sage_grpo.forecast.architecture import find_architecture
from sage_grpo.forecast.published import PUBLISHED
from sage_grpo.models import ModelError
from sage_grpo.models.policy import build_solver, solve
from sage_grpo.models.spec import ModelSpec
from slowly import slow_but

CLOSE = {"rtol": double.CLOSE, "atol": double.CLOSE}
ROWS = {row.name: row for row in TABLE}
LOADED = [name for name, row in ROWS.items() if row.verdict != "refused"]
QUICK = ("LTX-Video-0.9.5", "LTX-Video-0.9.7-distilled", "FLUX.1-dev")
STEPS = 2


def documented() -> list[list[str]]:
    """Name, pipeline, scheduler and verdict of every row of the document."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = text.split("## Published checkpoints", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return [[cell.strip("`") for cell in row[:4]] for row in rows[2:]]


def test_the_document_says_what_is_tested_here() -> None:
    assert documented() == [[row.name, row.pipeline, row.grid, row.verdict] for row in TABLE]


@pytest.mark.parametrize("name", [name for name in ROWS if name not in LOADED])
def test_a_checkpoint_that_cannot_be_used_is_refused_by_name(name: str, checkpoint, tmp_path) -> None:
    with pytest.raises(ModelError, match=ROWS[name].words):
        ModelSpec(path=str(ROWS[name].build(checkpoint, tmp_path)), cache=None).load("cpu")


@pytest.mark.parametrize("name", slow_but(LOADED, *QUICK))
@pytest.mark.usefixtures("in_double")
def test_a_published_configuration_samples_as_the_stock_pipeline(name: str, checkpoint, tmp_path) -> None:
    """With the guidance and the solver of its files, and with a warning exactly where the document promises one."""
    row = ROWS[name]
    folder = row.build(checkpoint, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = ModelSpec(path=str(folder), cache=None, **fields(row)).load("cpu")
    said = [str(one.message) for one in caught if "distilled" in str(one.message)]
    assert bool(said) == (row.verdict == "warns")
    assert all(row.words in text for text in said)
    planned = find_architecture(ours.spec)  # what `sage-grpo plan` knows of it without reading weights
    torch.testing.assert_close(planned.grid(7).sigmas, ours.sigmas(7), **CLOSE)
    assert planned.guidance_scale == (1.0 if ours.guidance.embedded else ours.guidance_scale)
    if row.kind in {*tiny.SOUND, *tiny.EDITS}:  # test_ltx2.py and test_qwen_edit.py compare them
        return
    x, conditions, latents = sampled(row, folder, ours)
    y = solve(ours, build_solver(ours, "checkpoint", STEPS), x, conditions)
    torch.testing.assert_close(y, latents, **CLOSE)
    assert (y - x).abs().max() > 1e-3


def fields(row: Published) -> dict:
    assert row.kind is not None
    size = (test_parity if in_parity(row) else test_families).size_of(row.kind)
    return {
        "train": False,
        "negative_prompt": "" if row.kind in test_families.UNTOLD else test_families.NEGATIVE,
        **size,
    }


def in_parity(row: Published) -> bool:
    return str(row.kind).startswith(("hunyuan15", "wan"))


def sampled(row: Published, folder: Path, ours) -> tuple:
    """Noise, conditions, and the latents that the stock pipeline makes of them."""
    kind = "ltx" if row.pipeline == "LTXPipeline" else str(row.kind)
    x, scale = test_families.start(ours), ours.guidance_scale
    if in_parity(row):
        scale = None if kind.startswith("hunyuan15") else scale
        latents, _, _ = test_parity.stock(folder, kind, x, scale, steps=STEPS)
        return x, test_parity.conditions_of(ours, kind), latents
    _, latents, _, _ = test_families.stock(folder, kind, x, scale, steps=STEPS)
    return x, ours.encode(test_families.PROMPTS), latents


def test_a_plan_knows_the_same_of_checkpoints_that_are_not_here() -> None:
    """`sage-grpo plan` has figures of its own for some names."""
    for name, known in PUBLISHED.items():
        row = ROWS[name]
        if row.scheduler is not None:  # FLUX.2's was not read; its pipeline's shift goes by tokens and steps
            kind, settings = row.scheduler
            known_settings = {"shift": 1.0, **known.scheduler}
            assert known.scheduler["_class_name"] == kind
            assert all(known_settings.get(key, value) == value for key, value in settings.items())
        assert known.boundary == row.index.get("boundary_ratio")
        assert known.guidance == row.guider
