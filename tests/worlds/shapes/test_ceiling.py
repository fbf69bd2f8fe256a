"""`sage-grpo shapes ceiling`: what clean clips score, as they are and after the VAE."""

from __future__ import annotations

import json
from pathlib import Path

from sage_grpo.commands.shapes import Options, run


def test_the_ceiling_is_measured_and_written(tmp_path: Path) -> None:
    assert run(Options(action="ceiling", prompts=4, draws=1, out=tmp_path / "new")) == 0
    found = json.loads((tmp_path / "new" / "ceiling.json").read_text())
    assert (found["prompts"], found["draws"], found["seed"]) == (4, 1, 1)
    clean, after = found["clean"], found["after_vae"]
    assert clean["Overall"] > 1.98  # the judge knows a clean clip
    assert 1.8 < after["Overall"] < clean["Overall"] - 0.02  # the VAE costs something, and not much
    assert clean["drift"] < 0.01 < after["drift"] < 0.05
    assert clean["flicker"] < after["flicker"]
