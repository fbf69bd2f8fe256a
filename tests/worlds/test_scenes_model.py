"""The model of the scenes world that lies in the repository's folder scenes/: small pieces, safe files, and what its card says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from sage_grpo.worlds.making.score import score
from sage_grpo.worlds.world import SCENES

FOLDER = Path(__file__).parents[2] / "scenes"
MEGABYTE = 1_000_000


def test_it_comes_in_small_pieces_of_safe_files() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md"}
    assert max(file.stat().st_size for file in files) <= 10 * MEGABYTE
    assert sum(file.stat().st_size for file in files) <= 40 * MEGABYTE


def test_what_was_measured_of_it_is_what_its_card_says() -> None:
    """A model that is exchanged without its figures, or the other way round, would leave documents that speak of another one."""
    kept = json.loads((Path(__file__).parents[2] / "benchmarks/results/scenes_model.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert f"{kept['psnr']:.2f} dB PSNR" in card
    for part in ("VQ", "MQ", "TA", "Overall", "drift"):
        assert f"| {part} | {kept['model'][part]:.3f} |" in card


@pytest.mark.slow
def test_its_clips_show_what_was_asked_for(tmp_path: Path) -> None:
    """Far above chance (0.228 for TA) with few prompts and few steps: weights that were mixed up or damaged show noise."""
    copy = shutil.copytree(FOLDER, tmp_path / "scenes")
    score(SCENES, copy, prompts=6, steps=8, pictures=tmp_path, device=torch.device("cpu"))
    found = json.loads((tmp_path / "scores.json").read_text())["model"]
    assert found["TA"] > 0.4
    assert found["VQ"] > 0.3
