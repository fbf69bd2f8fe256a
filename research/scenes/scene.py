"""The scenes that can be shown: textured objects that do something in a place, before a camera that may pan, to and from text.

A `Scene` is the part that a prompt names. A `SceneBatch` adds what a prompt leaves open (where things stand, at
which phase and angle they start, which part of the place is seen) and keeps everything in tensors, so that
rendering needs no loop over clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from research.scenes.grammar import AnyScene, is_heldout, named_in, vocabulary_of
from research.scenes.judging import Rows
from sage_grpo.utils.suggest import did_you_mean

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "place": ("meadow", "desert", "snow", "city"),
    "camera": ("still", "left", "right"),
    "count": ("one", "two", "three"),
    "kind": ("ball", "box", "star", "ring", "cone"),
    "colour": ("red", "green", "blue", "yellow", "magenta", "cyan"),
    "texture": ("plain", "striped", "dotted", "checked"),
    "verb": ("right", "left", "bounce", "spin", "rise", "circle"),
    "relation": ("alone", "front", "behind", "left", "right"),
    "other_kind": ("none", "ball", "box", "star", "ring", "cone"),
    "other_colour": ("none", "red", "green", "blue", "yellow", "magenta", "cyan"),
}
"""Every attribute and its values; the position of a value is its index in a SceneBatch.

The last three speak of a second object that stands there: `relation` says where the first one is, seen from it."""

FRAMES, SIDE, FPS = 17, 64, 8.0
"""The format of this world's clips."""

MEMBERS = 4
"""Most objects in one scene: three that move together, then the one that stands."""

Split = Literal["train", "heldout", "all"]

PASSES = ("front", "behind")
"""Relations of an object that goes past the other; only "right" and "left" do."""
BESIDE = ("left", "right")
"""Relations of an object that stays at its side of the other."""
_TRAVELS = ("right", "left")
ROLLS = ("ball", "star", "ring")
"""Kinds that turn as they travel; the others slide."""

_NOUNS = {kind: (kind, f"{kind}s") for kind in ATTRIBUTES["kind"]} | {"box": ("box", "boxes")}
_COUNTS = {"one": "a", "two": "two", "three": "three"}

# A verb as one does it, as several do it, and as they are seen doing it.
_VERBS: dict[str, tuple[str, str, str]] = {
    "bounce": ("bounces", "bounce", "bouncing"),
    "spin": ("spins", "spin", "spinning"),
    "rise": ("floats up", "float up", "floating up"),
    "circle": ("circles", "circle", "circling"),
}
_GOES = {True: ("rolls", "roll", "rolling"), False: ("slides", "slide", "sliding")}
_WHERE: dict[str, tuple[str, str]] = {
    "meadow": ("in a meadow", "over a meadow"),
    "desert": ("in the desert", "over a desert"),
    "snow": ("in the snow", "over snow"),
    "city": ("in a city at night", "over a city street"),
}
_CAMERAS: dict[str, tuple[str, str]] = {
    "still": ("", ""),
    "left": ("while the camera pans left", "as the view moves left"),
    "right": ("while the camera pans right", "as the view moves right"),
}
_RELATIONS: dict[str, tuple[str, str]] = {
    "front": ("in front of", "before"),
    "behind": ("behind", "in back of"),
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
}

TEMPLATES: tuple[str, ...] = (
    "{subject} {does} {beside} {where} {camera}",
    "{where} {subject} {does} {beside} {camera}",
    "the video shows {subject} {doing} {beside} {where} {camera}",
    "{subject_in_colour} {does} {beside_too} {where_too} {camera_too}",
    "{camera_too} we see {subject} {doing} {beside_too} {where}",
    "a clip of {subject_in_colour} {doing} {where_too} {beside_too} {camera}",
)
"""Sentences that name every attribute; `to_text` fills them. What is not said is the rule: a still camera, nothing else there."""


@dataclass(frozen=True, kw_only=True)
class Scene(AnyScene):
    """The attributes that a prompt names; the last four have the value of what need not be said."""

    attributes = ATTRIBUTES

    place: str
    """The place."""
    count: str
    """The number of objects that move; they are alike and move together."""
    kind: str
    """The kind of object that moves."""
    colour: str
    """Color of what moves."""
    texture: str
    """Pattern of what moves; it turns with the object."""
    verb: str
    """Its motion: goes right or left, bounces, spins on the spot, floats up, or circles in the air."""
    camera: str = "still"
    """The camera's motion: with "left" the place scrolls to the right."""
    relation: str = "alone"
    """The object's side, seen from a second one: it goes past "front" or "behind" it, or stays "left" or "right" of it."""
    other_kind: str = "none"
    """The kind of the second object; it stands, and is plain."""
    other_colour: str = "none"
    """Color of the second object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if reason := _impossible(self.names):
            raise ValueError(reason)


@dataclass(frozen=True, kw_only=True)
class SceneBatch(Rows):
    """Scenes as tensors, with the continuous parameters that no prompt names."""

    place: Tensor
    """int64, B, as all indices of ATTRIBUTES."""
    camera: Tensor
    """int64, B."""
    count: Tensor
    """int64, B."""
    kind: Tensor
    """int64, B."""
    colour: Tensor
    """int64, B."""
    texture: Tensor
    """int64, B."""
    verb: Tensor
    """int64, B."""
    relation: Tensor
    """int64, B."""
    other_kind: Tensor
    """int64, B; 0 is none."""
    other_colour: Tensor
    """int64, B; 0 is none."""
    offset: Tensor
    """float32, B x 2 in [-1, 1]: where the scene lies (x, y) in the room that it has."""
    layout: Tensor
    """float32, B x MEMBERS x 2 in [-1, 1]: how every object stands off its place in the group."""
    phase: Tensor
    """float32, B in [0, 1): where a bounce or a circle starts."""
    angle: Tensor
    """float32, B in [0, 1): the turn at which something that rolls or spins starts."""
    view: Tensor
    """float32, B in [-1, 1]: which part of the place is seen."""

    def scenes(self) -> list[Scene]:
        """The named attributes of every clip."""
        columns = [getattr(self, name).tolist() for name in ATTRIBUTES]
        names = [[values[i] for i in column] for values, column in zip(ATTRIBUTES.values(), columns)]
        return [Scene(**dict(zip(ATTRIBUTES, row))) for row in zip(*names)]

    def texts(self, template_index: int = 0) -> list[str]:
        """A prompt for every clip, all from one template."""
        return [to_text(scene, template_index) for scene in self.scenes()]


def batch_of(scenes: Sequence[Scene], generator: torch.Generator | None = None) -> SceneBatch:
    """Tensors for these scenes, with freshly drawn nuisance parameters (on CPU)."""
    table = torch.tensor([scene.indices for scene in scenes], dtype=torch.int64).reshape(-1, len(ATTRIBUTES))
    return _with_nuisance(table, generator)


def random_scenes(n: int, generator: torch.Generator | None = None, split: Split = "train") -> SceneBatch:
    """n clips of a split, with replacement (on CPU): one to three objects alike, or one and a second that stands (three in ten)."""
    sides = {"train": (False,), "heldout": (True,), "all": (False, True)}
    if split not in sides:
        raise ValueError(f"Unknown split {split!r}; use one of {', '.join(sides)}.{did_you_mean(split, sides)}")
    rows: list[tuple[int, ...]] = []
    while len(rows) < n:
        drawn = _draw(max(64, 2 * (n - len(rows))), generator)
        rows += [row for row in map(tuple, drawn.tolist()) if _side(row) in sides[split]]
    return _with_nuisance(torch.tensor(rows[:n], dtype=torch.int64).reshape(-1, len(ATTRIBUTES)), generator)


def some_scenes(split: Split, n: int, seed: int = 0) -> list[Scene]:
    """A fixed list of n different scenes of a split; there are too many to list them all."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[Scene, None] = {}
    while len(found) < n:
        found.update(dict.fromkeys(random_scenes(n, generator, split).scenes()))
    return list(found)[:n]


def to_text(scene: Scene, template_index: int = 0) -> str:
    """A sentence that names all attributes; template_index counts round TEMPLATES."""
    many = scene.count != "one"
    noun = _NOUNS[scene.kind][many]
    travels = scene.verb in _TRAVELS
    forms = _GOES[scene.kind in ROLLS] if travels else _VERBS[scene.verb]
    toward = f" {scene.verb}" if travels else ""
    seen = ["" if scene.relation == "alone" else form for form in _RELATIONS.get(scene.relation, ("", ""))]
    beside = [f"{form} a {scene.other_colour} {scene.other_kind}" if form else "" for form in seen]
    text = TEMPLATES[template_index % len(TEMPLATES)].format(
        subject=f"{_COUNTS[scene.count]} {scene.texture} {scene.colour} {noun}",
        subject_in_colour=f"{_COUNTS[scene.count]} {scene.texture} {noun} in {scene.colour}",
        does=forms[many] + toward,
        doing=forms[2] + toward,
        beside=beside[0],
        beside_too=beside[1],
        where=_WHERE[scene.place][0],
        where_too=_WHERE[scene.place][1],
        camera=_CAMERAS[scene.camera][0],
        camera_too=_CAMERAS[scene.camera][1],
    )
    return " ".join(text.split())


def from_text(text: str) -> Scene:
    """The scene that a sentence names; the inverse of `to_text` for every template.

    Any order of known phrases is understood as long as each attribute is named once; the color and the kind after
    a relation ("behind a yellow cone") are those of the second object. A camera that is not named stands still.
    """
    found: dict[str, str] = {}
    waiting: set[str] = set()
    for attribute, value in named_in(text, _meanings(), words()):
        if attribute == "relation":
            waiting = {"kind", "colour"}
        elif attribute in waiting:
            waiting.remove(attribute)
            attribute = f"other_{attribute}"
        if found.setdefault(attribute, value) != value:
            raise ValueError(f"The text names two values of {attribute}: {found[attribute]!r} and {value!r}: {text!r}")
    found.setdefault("count", "one")
    needed = [name for name in ATTRIBUTES if name in ("place", "kind", "colour", "texture", "verb")]
    needed += ["other_kind", "other_colour"] if "relation" in found else []
    missing = [f"{name} ({', '.join(ATTRIBUTES[name])})" for name in needed if name not in found]
    if missing:
        raise ValueError(f"The text does not name: {'; '.join(missing)}. Text: {text!r}")
    return Scene(**found)


@cache
def words() -> tuple[str, ...]:
    """Every word that `to_text` can write, sorted: the vocabulary of a word-level tokenizer."""
    sayings = [form for forms in (*_WHERE.values(), *_CAMERAS.values()) for form in forms]
    return vocabulary_of([*map(" ".join, _meanings()), *sayings, *_COUNTS.values()], TEMPLATES)


@cache
def _meanings() -> dict[tuple[str, ...], tuple[str, str]]:
    """Phrase -> (attribute, value), for the phrases that carry a value. The longest that fits is meant: "pans left" is not "left"."""
    table: dict[str, tuple[str, str]] = {}
    for attribute in ("colour", "texture"):
        table.update({value: (attribute, value) for value in ATTRIBUTES[attribute]})
    table.update({count: ("count", count) for count in ("two", "three")})
    table.update({noun: ("kind", kind) for kind, nouns in _NOUNS.items() for noun in nouns})
    table.update({form: ("verb", verb) for verb, forms in _VERBS.items() for form in forms})
    for forms in _GOES.values():
        table.update({f"{form} {way}": ("verb", way) for form in forms for way in _TRAVELS})
    table.update({place: ("place", place) for place in ATTRIBUTES["place"]})
    table.update({f"{form} {way}": ("camera", way) for form in ("pans", "moves") for way in ("left", "right")})
    table.update({form: ("relation", where) for where, forms in _RELATIONS.items() for form in forms})
    return {tuple(phrase.split()): meaning for phrase, meaning in table.items()}


def _impossible(names: tuple[str, ...]) -> str:
    """Why values that are all known cannot be shown together; empty where they can."""
    scene = dict(zip(ATTRIBUTES, names))
    relation, verb = scene["relation"], scene["verb"]
    if verb == "spin" and scene["texture"] == "plain" and scene["kind"] in ("ball", "ring"):
        return f"Nobody sees a plain {scene['kind']} spin; give it another texture, kind or verb."
    others = (scene["other_kind"], scene["other_colour"])
    if relation == "alone":
        return (
            ""
            if others == ("none", "none")
            else "Scene.relation is 'alone', but another object is named; say how they stand."
        )
    if "none" in others:
        return f"Scene.relation is {relation!r}, so it needs other_kind and other_colour."
    if scene["count"] != "one":
        return f"Scene.relation is {relation!r}, which one object has to another; Scene.count is {scene['count']!r}."
    if others[0] == scene["kind"] or others[1] == scene["colour"]:
        return f"The second object must differ in kind and color from the first; both are {scene['colour']} or a {scene['kind']}."
    if (relation in PASSES) != (verb in _TRAVELS):
        return f"An object that goes right or left passes in front or behind, others stay left or right: not {verb!r} with {relation!r}."
    return ""


@cache
def _side(row: tuple[int, ...]) -> bool | None:
    """True where a row of indices is held out; None where it cannot be shown."""
    names = tuple(values[index] for values, index in zip(ATTRIBUTES.values(), row))
    return None if _impossible(names) else is_heldout(names)


def _draw(n: int, generator: torch.Generator | None) -> Tensor:
    """Rows of indices, most of them possible."""
    table = torch.stack(
        [torch.randint(len(values), (n,), generator=generator) for values in ATTRIBUTES.values()], dim=1
    )
    column = {name: table[:, place] for place, name in enumerate(ATTRIBUTES)}
    alone = torch.rand(n, generator=generator) < 0.7
    travels = column["verb"] < len(_TRAVELS)
    side = 1 + torch.randint(2, (n,), generator=generator)
    column["relation"].copy_(torch.where(alone, 0, torch.where(travels, side, side + 2)))
    column["count"].mul_(alone)
    for name in ("kind", "colour"):  # a value that differs from the first object's, counted from 1: 0 is none
        values = len(ATTRIBUTES[name])
        shift = 1 + column[f"other_{name}"] % (values - 1)
        column[f"other_{name}"].copy_(torch.where(alone, 0, 1 + (column[name] + shift) % values))
    return table


def _with_nuisance(table: Tensor, generator: torch.Generator | None) -> SceneBatch:
    n = len(table)
    return SceneBatch(
        **dict(zip(ATTRIBUTES, table.unbind(1))),
        offset=2 * torch.rand(n, 2, generator=generator) - 1,
        layout=2 * torch.rand(n, MEMBERS, 2, generator=generator) - 1,
        phase=torch.rand(n, generator=generator),
        angle=torch.rand(n, generator=generator),
        view=2 * torch.rand(n, generator=generator) - 1,
    )
