"""Prompts of a run: files, or the embedded world."""

from __future__ import annotations

import random

from torch import Tensor

from sage_grpo.data.prompts import SETS, Prompt, load_prompts
from sage_grpo.objects import refuse_object
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.own import Own
from sage_grpo.video import read_image


def load_sources(config: TrainConfig, own: Own | None = None) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts and held-out prompts."""
    own, source = own or Own(), config.data.held_out
    prompts = own.prompts if own.prompts is not None else prompts_from(config.data.prompts, split="train")
    if own.held_out is not None:
        return list(prompts), list(own.held_out)
    return list(prompts), [] if source is None else prompts_from(source)


NAMES = ("shapes", *SETS)
"""Prompts that need no file."""


def prompts_from(source: str, *, split: str = "heldout") -> list[Prompt]:
    """The prompts of a file, of a set of the package, or of a split of the embedded world."""
    refuse_object(source, "its prompts", "Give a file (--prompts, --data.prompts)")
    return shapes_prompts(split) if source == "shapes" else load_prompts(source, NAMES)


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
    return None if prompt.image is None else read_image(prompt.image)
