"""The model of the scenes world that lies in the repository's folder scenes/: small pieces, safe files, and what its card says of it."""

from __future__ import annotations

import json
from pathlib import Path

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
