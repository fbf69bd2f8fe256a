"""Scenes of the shapes world: shape x color x motion x speed x size x background, to and from text.

A `Scene` holds the attributes that a prompt names. A `SceneBatch` adds those that a prompt leaves open (the path's place, its start phase) and keeps
everything in tensors, so that rendering needs no loop over clips.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

import torch
from torch import Tensor

from sage_grpo.utils.suggest import did_you_mean

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": ("circle", "square", "triangle", "cross", "ring"),
    "colour": ("red", "green", "blue", "yellow", "magenta", "cyan"),
    "motion": ("right", "left", "up", "down", "loop", "bounce"),
    "speed": ("slow", "fast"),
    "size": ("small", "large"),
    "background": ("white", "grey", "sand", "navy"),
}
"""Every attribute and its values; the position of a value is its index in a SceneBatch."""

FRAMES, SIDE, FPS = 9, 32, 8.0
"""The format of the miniature's clips."""

Split = Literal["train", "heldout", "all"]

# Wordings of each value. A template names the form, so wording varies but no word has two meanings.
_FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "shape": {"shape": ATTRIBUTES["shape"]},
    "colour": {"colour": ATTRIBUTES["colour"]},
    "background": {"background": ATTRIBUTES["background"]},
    "size": {"size": ("small", "large"), "bulk": ("little", "big")},
    "speed": {"slowly": ("slowly", "quickly"), "pace": ("at low speed", "at high speed")},
    "motion": {
        "moves": ("moves right", "moves left", "moves up", "moves down", "loops around", "bounces"),
        "moving": ("moving right", "moving left", "moving up", "moving down", "looping around", "bouncing"),
    },
}

TEMPLATES: tuple[str, ...] = (
    "a {size} {colour} {shape} {moves} {slowly} on a {background} background",
    "on a {background} background a {size} {colour} {shape} {moves} {slowly}",
    "a {colour} {shape} of {size} size is {moving} {slowly} over a {background} backdrop",
    "{slowly} {moving} across a {background} scene we see a {size} {colour} {shape}",
    "the video shows a {bulk} {shape} in {colour} that {moves} {pace} against {background}",
    "in front of a {background} wall there is a {bulk} {colour} {shape} {moving} {pace}",
    "a clip of a {colour} {shape} that is {bulk} and {moves} {pace} in a {background} room",
    "watch a {size} {shape} painted {colour} as it {moves} {pace} before a {background} curtain",
)
"""Sentences that name all six attributes; `to_text` fills them."""

# Words inside a phrase that do not distinguish values ("at low speed": only "low" does).
_PHRASE_FILLERS = frozenset({"at", "speed", "moves", "moving", "around"})


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The attributes that a prompt names, each with one of the values in ATTRIBUTES."""

    shape: str
    colour: str
    motion: str  # direction of a straight path, or "loop" (clockwise), or "bounce" (a ball on the floor)
    speed: str
    size: str
    background: str

    def __post_init__(self) -> None:
        for (name, values), value in zip(ATTRIBUTES.items(), self.names):
            if value not in values:
                raise ValueError(
                    f"Scene.{name} is {value!r}, not of {', '.join(values)}.{did_you_mean(str(value), values)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The values, in the order of ATTRIBUTES."""
        return tuple(getattr(self, name) for name in ATTRIBUTES)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(values.index(value) for values, value in zip(ATTRIBUTES.values(), self.names))

    @property
    def heldout(self) -> bool:
        """True where the combination is kept out of all training: about one in ten, by a hash of the names, so that the split never moves."""
        return hashlib.sha256("/".join(self.names).encode()).digest()[0] % 10 == 0


@dataclass(frozen=True, kw_only=True)
class SceneBatch:
    """Scenes as tensors: a row per clip, int64 indices of the attributes, and the continuous parameters that no prompt names."""

    shape: Tensor
    colour: Tensor
    motion: Tensor
    speed: Tensor
    size: Tensor
    background: Tensor
    offset: Tensor  # float32, B x 2 in [-1, 1]: the path's place (x, y) within its room
    phase: Tensor  # float32, B in [0, 1): the start of a loop or a bounce; straight paths ignore it

    def __len__(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: slice | Tensor | list[int]) -> Self:
        return type(self)(**{name: rows[index] for name, rows in vars(self).items()})

    def to(self, device: torch.device | str) -> Self:
        return type(self)(**{name: rows.to(device) for name, rows in vars(self).items()})

    def scenes(self) -> list[Scene]:
        columns = [getattr(self, name).tolist() for name in ATTRIBUTES]
        names = [[values[i] for i in column] for values, column in zip(ATTRIBUTES.values(), columns)]
        return [Scene(**dict(zip(ATTRIBUTES, row))) for row in zip(*names)]

    def texts(self, template_index: int = 0) -> list[str]:
        return [to_text(scene, template_index) for scene in self.scenes()]


def batch_of(scenes: Sequence[Scene], generator: torch.Generator | None = None) -> SceneBatch:
    """Tensors for these scenes, with freshly drawn offsets and phases (on CPU)."""
    table = torch.tensor([scene.indices for scene in scenes], dtype=torch.int64).reshape(-1, len(ATTRIBUTES))
    offset = 2 * torch.rand(len(table), 2, generator=generator) - 1
    phase = torch.rand(len(table), generator=generator)
    return SceneBatch(**dict(zip(ATTRIBUTES, table.unbind(1))), offset=offset, phase=phase)


def random_scenes(n: int, generator: torch.Generator | None = None, split: Split = "train") -> SceneBatch:
    """n clips, uniform over the combinations of a split, with replacement (on CPU)."""
    scenes = scenes_of(split)
    drawn = torch.randint(len(scenes), (n,), generator=generator).tolist()
    return batch_of([scenes[place] for place in drawn], generator)


@cache
def scenes_of(split: Split) -> tuple[Scene, ...]:
    """The combinations of a split: `train`, about nine in ten, for captions and prompts, and `heldout` for evaluation."""
    every = (Scene(**dict(zip(ATTRIBUTES, row))) for row in itertools.product(*ATTRIBUTES.values()))
    return tuple(scene for scene in every if split == "all" or scene.heldout == (split == "heldout"))


def some_scenes(split: Split, n: int, seed: int) -> list[Scene]:
    """A fixed list of n combinations of a split; all of them, in their own order, where it has no more."""
    scenes = scenes_of(split)
    return list(scenes) if n >= len(scenes) else random.Random(seed).sample(scenes, n)


def to_text(scene: Scene, template_index: int = 0) -> str:
    """A sentence that names all attributes; template_index wraps around TEMPLATES."""
    words = {}
    for attribute, forms in _FORMS.items():
        value = ATTRIBUTES[attribute].index(getattr(scene, attribute))
        words.update({form: phrases[value] for form, phrases in forms.items()})
    return TEMPLATES[template_index % len(TEMPLATES)].format(**words)


def from_text(text: str) -> Scene:
    """The scene that a sentence names; the inverse of `to_text` for every template.

    Any order of known words is understood as long as each attribute is named exactly once.
    """
    values: dict[str, str] = {}
    for word in re.findall(r"[^\s.,;:!?\"()]+", text.lower()):
        if word in _meanings():
            attribute, value = _meanings()[word]
            if values.setdefault(attribute, value) != value:
                raise ValueError(f"Two values of {attribute}: {values[attribute]!r} and {value!r}: {text!r}")
        elif word not in words():
            raise ValueError(f"Unknown word {word!r} in {text!r}.{did_you_mean(word, words())} words() lists all.")
    missing = [f"{name} ({', '.join(ATTRIBUTES[name])})" for name in ATTRIBUTES if name not in values]
    if missing:
        raise ValueError(f"The text does not name: {'; '.join(missing)}. Text: {text!r}")
    return Scene(**values)


@cache
def words() -> tuple[str, ...]:
    """Every word that `to_text` can write, sorted: the vocabulary of a word-level tokenizer."""
    phrases = [phrase for forms in _FORMS.values() for form in forms.values() for phrase in form]
    plain = [re.sub(r"\{\w+\}", " ", template) for template in TEMPLATES]
    return tuple(sorted({word for text in (*phrases, *plain) for word in text.split()}))


@cache
def _meanings() -> dict[str, tuple[str, str]]:
    """Word -> (attribute, value), for the words that carry a value."""
    return {
        word: (attribute, value)
        for attribute, forms in _FORMS.items()
        for phrases in forms.values()
        for value, phrase in zip(ATTRIBUTES[attribute], phrases)
        for word in phrase.split()
        if word not in _PHRASE_FILLERS
    }
