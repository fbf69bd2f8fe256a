"""A newcomer's path: `pip install` of the built wheel, outside the repository, to a LoRA that stock diffusers loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sage_grpo
import tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REWARD = """
def bright(videos, prompts, fps):
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255
"""
CONFIG = """
recipe: wan/branch
model: {path: CHECKPOINT, dtype: float32, frames: 5, height: 16, width: 16, lora: {rank: 2}}
rewards: [{name: "my_reward:bright"}]
data: {prompts: prompts.txt, eval_prompts: prompts.txt}
batch: {prompts: 2, group_size: 2}
rollout: {steps: 3, window: {at: [1]}}
evaluate: {prompts: 2, steps: 2}
iterations: 2
out: run
"""


def install(folder: Path) -> Path:
    """Where pip puts the wheel: everything that it needs is there already."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target"]
    subprocess.run([*command, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


def ran(installed: Path, folder: Path, *words: str) -> str:
    """What a command prints that is run in `folder` and knows nothing of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


SESSION = """
import sys
import sage_grpo, sage_grpo.models.spec as spec
from sage_grpo.cli.main import main
print(sage_grpo.__file__, spec.ModelSpec(train=False, cache=None).load().latent_shape())
sys.exit(main(["train", "--config", "mine.yaml"]))
"""
"""One process, because its imports take longer than all that it does."""


def test_from_the_wheel_to_a_lora_in_diffusers(tmp_path: Path) -> None:
    installed = install(tmp_path / "wheel")
    said = ran(installed, tmp_path, str(installed / "bin" / "sage-grpo"), "--version")
    assert f"sage-grpo {sage_grpo.__version__}" in said
    checkpoint = tiny.build("wan_t2v", tmp_path / "checkpoint")
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "prompts.txt").write_text("a red ball\na blue boat\n")
    (tmp_path / "mine.yaml").write_text(CONFIG.replace("CHECKPOINT", str(checkpoint)))
    found = ran(installed, tmp_path, sys.executable, "-c", SESSION)
    assert str(installed) in found
    assert "(16, 3, 4, 4)" in found  # the embedded model came with the wheel
    pipe = tiny.pipeline(checkpoint)
    wanted = {
        "prompt": "a red ball",
        "num_frames": 5,
        "height": 16,
        "width": 16,
        "num_inference_steps": 2,
        "output_type": "pt",
    }

    def clip() -> torch.Tensor:
        return pipe(**wanted, generator=torch.Generator().manual_seed(0)).frames

    before = clip()
    pipe.load_lora_weights(str(tmp_path / "run" / "final"))
    assert pipe.get_list_adapters()["transformer"]
    assert not torch.equal(clip(), before)  # it binds, and it has learned something
