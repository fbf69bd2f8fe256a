"""The second world by the names of its modules: what its prompt files and its models are made from."""

from __future__ import annotations

from pathlib import Path

from sage_grpo.worlds.world import PromptWorld

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "model"
"""A Wan folder of the world, its learned reward beside the networks."""
SCENES = PromptWorld(
    name="scenes",
    package="research.scenes",
    judge_class="ScenesJudge",
    prompts={"train": 2048, "heldout": 512},
)
"""Textured objects with shadows before a background that scrolls, 17 frames of 64 x 64. Its ceiling:
`python -m research.pretraining.scenes ceiling --prompts 128` (scenes_ceiling.json among the results)."""
