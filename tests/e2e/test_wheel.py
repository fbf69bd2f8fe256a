"""The wheel carries the checkpoint: what is installed elsewhere trains without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_outside_the_repository_loads_the_embedded_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    code = (
        "import sage_grpo, sage_grpo.models.spec as spec;"
        "model = spec.ModelSpec(train=False, cache=None).load();"
        "print(sage_grpo.__file__, model.latent_shape())"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert str(installed) in found
    assert "(16, 3, 4, 4)" in found
