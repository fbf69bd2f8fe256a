"""The scenes world's training data: clips with flaws, and captions some of which name wrong values."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from research.pretraining.imperfect import Clips
from research.pretraining.options import Flaws
from research.scenes.render import render
from research.scenes.scene import (
    ATTRIBUTES,
    BESIDE,
    FRAMES,
    PASSES,
    SIDE,
    Scene,
    SceneBatch,
    random_scenes,
    to_text,
)

ROUGH = Flaws(jitter_share=0.5, jitter=0.12, blur_share=0.4, blur=2.0, noise_share=0.3, noise=0.08)
"""Flaws of what the VAE learns on: stronger than those of the flow's data."""
CLIPS = Clips(random_scenes=random_scenes, render=render, frames=FRAMES, side=SIDE, rough=ROUGH)
"""Clips of this world."""
MOST_TRIES = 50
"""Draws of a caption before it is the true one: a few scenes have hardly any neighbors."""


def imperfect_captions(batch: SceneBatch, flaws: Flaws, generator: torch.Generator) -> list[str]:
    """A caption for every clip; some name wrong values, but never a combination that is held out."""
    draw = random.Random(int(torch.randint(1 << 62, (), generator=generator)))
    return [to_text(misnamed(scene, flaws.wrong_word, draw), draw.randrange(1 << 16)) for scene in batch.scenes()]


def misnamed(scene: Scene, wrong_word: float, draw: random.Random) -> Scene:
    """The scene that a caption names: each attribute is another value with this probability.

    What cannot be shown or is held out is drawn again, so wrong values are a little rarer than asked for.
    """
    for _ in range(MOST_TRIES):
        wrong = {
            name: draw.choice(others)
            for name in ATTRIBUTES
            if draw.random() < wrong_word and (others := _other_values(scene, name))
        }
        try:
            named = replace(scene, **wrong)
        except ValueError:
            continue
        if not named.heldout:
            return named
    return scene


def _other_values(scene: Scene, name: str) -> list[str]:
    """Values that a caption may give an attribute by mistake: the sentence stays one about as many objects."""
    values = ATTRIBUTES[name]
    if scene.relation == "alone" and name in ("relation", "other_kind", "other_colour"):
        return []
    if scene.relation != "alone" and name == "count":
        return []
    if name == "relation":
        values = PASSES if scene.relation in PASSES else BESIDE
    return [value for value in values if value not in (getattr(scene, name), "none")]
