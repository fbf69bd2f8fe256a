"""Prompts of a run: files, or the embedded world."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from sage_grpo.data.prompts import Prompt, load_prompts
from sage_grpo.train.config import TrainConfig


def load_sources(config: TrainConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts and held-out prompts."""
    train = shapes_prompts("train") if config.data.prompts == "shapes" else load_prompts(config.data.prompts)
    held_out = config.data.eval_prompts or ("shapes" if config.data.prompts == "shapes" else None)
    if held_out is None:
        return train, []
    return train, shapes_prompts("heldout") if held_out == "shapes" else load_prompts(held_out)


def shapes_prompts(split: str) -> list[Prompt]:
    """The embedded world's prompts: every scene of a split once, with a template chosen by a fixed rule."""
    from sage_grpo.shapes import scene

    scenes = scene.train_scenes() if split == "train" else scene.heldout_scenes()
    draw = random.Random(f"shapes/{split}")
    prompts = [Prompt(scene.to_text(one, draw.randrange(len(scene.TEMPLATES)))) for one in scenes]
    draw.shuffle(prompts)
    return prompts


def first_frame(prompt: Prompt) -> Tensor | None:
    """A prompt's image, uint8 H x W x 3."""
    if prompt.image is None:
        return None
    import numpy
    from PIL import Image

    with Image.open(prompt.image) as picture:
        return torch.from_numpy(numpy.asarray(picture.convert("RGB")).copy())
