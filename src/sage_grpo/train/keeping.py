"""What the blocks of a network keep for their backward pass: as much as fits."""

from __future__ import annotations

from typing import Literal

from sage_grpo.models.base import VelocityModel
from sage_grpo.models.blocks import Keep


def choose_levels(asked: bool | Literal["attention", "auto"], model: VelocityModel) -> list[Keep]:
    """A level for every block."""
    levels: dict[bool | str, Keep] = {True: "input", False: "all", "attention": "attention"}
    level = levels.get(asked) or ("attention" if model.device.type == "cuda" else "all")
    return [level] * len(model.blocks())
