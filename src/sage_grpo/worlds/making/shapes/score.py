"""Scores of the shapes world's model, and of clean clips after its VAE."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.worlds.making import score as any_world
from sage_grpo.worlds.making.shapes.networks import load_vae
from sage_grpo.worlds.world import SHAPES


def score(folder: Path, *, prompts: int, steps: int, pictures: Path, device: torch.device) -> str:
    """Sample and judge a pipeline folder on held-out prompts; write pictures and scores.json, return the scores as a Markdown table."""
    return any_world.score(SHAPES, folder, prompts=prompts, steps=steps, pictures=pictures, device=device)


def clean_clips(folder: Path | None, prompts: Sequence[str], *, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Perfect clips of these prompts, as they are and after a folder's VAE (None: the embedded one)."""
    vae = load_vae(folder or Path(str(files("sage_grpo") / "worlds" / "shapes" / "assets")), device)
    return any_world.clean_clips(SHAPES, vae, prompts, seed=seed)
