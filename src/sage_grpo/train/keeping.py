"""What the blocks of a network keep for their backward pass: as much as fits."""

from __future__ import annotations

from typing import Literal

from sage_grpo.models.base import VelocityModel
from sage_grpo.models.blocks import Keep

Asked = bool | Literal["attention", "auto"]


def choose_levels(asked: Asked, model: VelocityModel) -> list[Keep]:
    """A level for every block."""
    return levels(asked, len(model.blocks()), cuda=model.device.type == "cuda")


def levels(asked: Asked, blocks: int, *, cuda: bool) -> list[Keep]:
    """The same before there is a model."""
    known: dict[bool | str, Keep] = {True: "input", False: "all", "attention": "attention"}
    return [known.get(asked) or ("attention" if cuda else "all")] * blocks
