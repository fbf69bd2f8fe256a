"""Valid ranges of fields, written once, in their types: `lr: Positive = 1e-5`.

`@checked` makes a dataclass of options that refuses other values; the parser names the whole key in its errors, and --help and the tables of
docs/config.md show the range.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from sage_grpo.utils.json_schema import LARGEST

KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list ([a, b])",
    "tuple": "a list of numbers ([0.9, 0.999])", "dict": "a mapping ({name: value})", "NoneType": "null", "Path": "a path",
}  # fmt: skip
"""Names of types in errors."""
LONGEST_PROMPT = 20_000
"""Characters of a prompt: four times the 1,024 tokens that the text encoders read at most. Tokenizers read all of it."""


def check_prompt(text: str, what: str = "The prompt") -> None:
    if len(text) > LONGEST_PROMPT:
        raise ValueError(
            f"{what} {text[:60]!r}... has {len(text):,} characters, more than {LONGEST_PROMPT:,}: shorten it."
        )


@dataclass(frozen=True)
class Range:
    """An interval of numbers. Neither NaN nor infinity lies in it: "no limit" is None."""

    least: float = -math.inf
    most: float = math.inf
    open_below: bool = False
    open_above: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        below = value < self.most if self.open_above else value <= self.most
        return above and below and (abs(value) < LARGEST if isinstance(value, int) else math.isfinite(value))

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "finite" if self.most == math.inf else f"at most {self.most:g}"
        if self.most == math.inf:
            if self.open_below:
                return "positive" if self.least == 0 else f"greater than {self.least:g}"
            return f"at least {self.least:g}"
        return f"in {'(' if self.open_below else '['}{self.least:g}, {self.most:g}{')' if self.open_above else ']'}"


@dataclass(frozen=True)
class Filled:
    """Text that is not blank."""

    def holds(self, value: str) -> bool:
        return bool(value.strip())

    def __str__(self) -> str:
        return "not empty"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**63 - 1)]  # as far as PyTorch's generators take it
Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(0, open_below=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1, open_above=True)]  # the share of an average that stays at each step
Fps = Annotated[float, Range(0, 240, open_below=True)]
Seconds = Annotated[float, Range(0, 7 * 86400, open_below=True)]  # at most a week
Folder = Annotated[str, Filled()]  # "" would be the current folder by accident


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def checked(kind: type[T]) -> type[T]:
    """A dataclass of options: frozen, keyword-only, and refused with the reason if a value is out of its range."""
    return dataclass(frozen=True, kw_only=True)(ranged(kind))


def ranged(kind: type[T]) -> type[T]:
    """Add the check of all fields to a class before it becomes a dataclass; its own `__post_init__` runs after the check."""
    further = vars(kind).get("__post_init__")

    def post_init(self: T) -> None:
        if wrong := list(faults(type(self), self, f"{type(self).__name__}.")):
            raise ValueError("\n".join(wrong))
        if further is not None:
            further(self)

    kind.__post_init__ = post_init  # type: ignore[attr-defined]
    return kind


def refuse(reasons: Mapping[str, bool], subject: str = "") -> None:
    """Raise a ValueError with the reasons that hold: sentences, or why `subject` does not go with the rest of a configuration."""
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"{subject} does not go with {'; nor with '.join(wrong)}." if subject else "\n".join(wrong))


def faults(kind: type, values: Any, prefix: str = "") -> Iterator[str]:
    """Values out of range in `values`: an instance of the dataclass `kind`, or a mapping or parser's namespace with its keys."""
    values = vars(values) if dataclasses.is_dataclass(values) else values
    for name, hint in type_hints(kind).items():
        if name in values:
            yield from _faults(hint, values[name], prefix + name)


def ranges(kind: type) -> dict[str, str]:
    """The fields of a dataclass that have a range, or whose items have one, with the range in words."""
    found = {name: _range(hint) for name, hint in type_hints(kind).items()}
    return {name: words for name, words in found.items() if words}


def _range(hint: Any) -> str:
    limits = _limits(hint)
    return str(limits[0]) if limits else next(filter(None, map(_range, reversed(get_args(hint)))), "")


@cache
def type_hints(kind: type) -> dict[str, Any]:
    """Field of a dataclass -> its type, with annotations."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def inner_dataclass(hint: Any) -> Any:
    """The dataclass in `X`, `X | None` or `list[X]`, annotated or not, or None."""
    hint = _plain(hint)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType, list) else (hint,)
    return next((kind for kind in options if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _faults(hint: Any, value: Any, name: str) -> Iterator[str]:
    origin, inner = get_origin(hint), get_args(hint)
    if value is None:
        if not _takes_nothing(hint):
            yield f"{name} must be {_in_words(hint)}, got null: give a value, or leave {name} out."
        return
    if origin is Annotated:
        for limit in _limits(hint):
            if wanted := _wanted(inner[0], limit, value):
                yield f"{name} must be {wanted}, got {value!r}."
        yield from _faults(inner[0], value, name)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, str | int | float | list | tuple):
            yield f"{name} must be {_in_words(hint)}, got {value!r}."
        else:
            yield from faults(hint, value, f"{name}.")
    elif origin is Literal and value not in inner:
        yield f"{name} must be {_in_words(hint)}, got {value!r}."
    elif origin in (Union, types.UnionType):
        words = [option for option in inner if get_origin(option) is Literal]
        text = isinstance(value, str) and str in inner
        if not text and not any(value in get_args(option) for option in words):  # a word in place of a number ("auto")
            for option in (one for one in inner if one not in words):
                yield from _faults(option, value, name)
    elif origin is dict and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _faults(inner[1], item, f"{name}.{key}")
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _faults(inner[min(place, len(inner) - 1)], item, f"{name}[{place}]")


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _limits(hint: Any) -> list[Range | Filled]:
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return [mark for mark in marks if isinstance(mark, Range | Filled)]


def _takes_nothing(hint: Any) -> bool:
    hint = _plain(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(map(_takes_nothing, get_args(hint)))
    return hint in (None, type(None), Any, object) or (get_origin(hint) is Literal and None in get_args(hint))


def _in_words(hint: Any) -> str:
    """The allowed values of a type, in words."""
    hint = _plain(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, inner))
    if dataclasses.is_dataclass(hint):
        return "a group of options ({name: value})"
    name = getattr(origin or hint, "__name__", str(hint))
    return KINDS.get(name, name)


def _wanted(kind: type, limit: Range | Filled, value: Any) -> str:
    """The allowed values and the given one; empty if the value is allowed."""
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "a number"
        if kind is int and not isinstance(value, int):
            return "a whole number"
        if isinstance(value, int) and abs(value) >= LARGEST:
            return "a number of at most 63 bits"
    return "" if limit.holds(value) else str(limit)
