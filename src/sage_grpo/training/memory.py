"""Activations that blocks keep for the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sage_grpo.models.base import VelocityModel, abilities
from sage_grpo.training.config import TrainConfig
from sage_grpo.types import Keep


def set_activations(config: TrainConfig, model: VelocityModel, chosen: Sequence[Keep] | None) -> None:
    """Set the activations that a loaded model's blocks keep, and record the choice in the model. None decides from the
    configuration alone."""
    if chosen is None:
        chosen = configured(config.update.gradient_checkpointing, len(model.blocks()), cuda=model.device.type == "cuda")
    model.keep(list(chosen))
    abilities(model).choices["blocks keep"] = kept(chosen)


def configured(asked: bool | Literal["attention", "auto"], blocks: int, *, cuda: bool) -> list[Keep]:
    """The configured level for every block; "auto" where memory is not known becomes attention on a GPU and all on a
    CPU."""
    known: dict[bool | str, Keep] = {True: "input", False: "all", "attention": "attention"}
    return [known.get(asked) or ("attention" if cuda else "all")] * blocks


def kept(chosen: Sequence[Keep]) -> str:
    """A description of the activations that blocks keep."""
    words = {"all": "everything", "attention": "attention's outputs", "input": "their input only"}
    return ", ".join(f"{words[level]} ({count} of {len(chosen)})" for level, count in Counter(chosen).items())
