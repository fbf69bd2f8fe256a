"""What the blocks of a network keep for their backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sage_grpo.types import Keep

Asked = bool | Literal["attention", "auto"]
TOLD: dict[Keep, str] = {"all": "everything", "attention": "attention's outputs", "input": "their input only"}


def levels(asked: Asked, blocks: int, *, cuda: bool) -> list[Keep]:
    """What was asked for; for "auto", what is right where memory is not known."""
    known: dict[bool | str, Keep] = {True: "input", False: "all", "attention": "attention"}
    return [known.get(asked) or ("attention" if cuda else "all")] * blocks


def kept(levels: Sequence[Keep]) -> str:
    """For people."""
    return ", ".join(f"{TOLD[level]} ({count} of {len(levels)})" for level, count in Counter(levels).items())
