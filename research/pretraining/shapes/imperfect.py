"""The shapes world's training data: clips with flaws, and captions some of which name wrong values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from research.pretraining.imperfect import Clips
from research.pretraining.options import Flaws
from sage_grpo.worlds.shapes.render import render
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, FRAMES, SIDE, SceneBatch, random_scenes, scenes_of, to_text

CLIPS = Clips(random_scenes=random_scenes, render=render, frames=FRAMES, side=SIDE)
"""Clips of this world."""


def imperfect_captions(batch: SceneBatch, flaws: Flaws, generator: torch.Generator) -> list[str]:
    """A caption for every clip; some name wrong values, but never a combination that is held out."""
    return [
        to_text(scene, int(template))
        for scene, template in zip(
            misnamed(batch, flaws.wrong_word, generator).scenes(),
            torch.randint(1 << 16, (len(batch),), generator=generator).tolist(),
        )
    ]


@cache
def _allowed() -> Tensor:
    """True at the attribute indices of every training combination."""
    allowed = torch.zeros([len(values) for values in ATTRIBUTES.values()], dtype=torch.bool)
    allowed[tuple(torch.tensor([scene.indices for scene in scenes_of("train")]).T)] = True
    return allowed


def misnamed(batch: SceneBatch, wrong_word: float, generator: torch.Generator) -> SceneBatch:
    """The scenes that the captions name: each attribute is another value with this probability.

    A draw that lands on a held-out combination is drawn again, so held-out captions never occur.
    """
    allowed = _allowed()
    true = torch.stack([getattr(batch, name) for name in ATTRIBUTES], dim=1)
    named = true.clone()
    todo = torch.arange(len(batch))
    while len(todo):
        columns = []
        for column, values in enumerate(ATTRIBUTES.values()):
            step = torch.randint(1, len(values), (len(todo),), generator=generator)
            wrong = torch.rand(len(todo), generator=generator) < wrong_word
            columns.append((true[todo, column] + step * wrong) % len(values))
        named[todo] = torch.stack(columns, dim=1)
        todo = todo[~allowed[tuple(named[todo].T)]]
    return replace(batch, **dict(zip(ATTRIBUTES, named.unbind(1))))
