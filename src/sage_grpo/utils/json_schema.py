"""Validates untrusted JSON: the only place where it is read.

A damaged or malicious file ends in a DocumentError of one line: invalid JSON, nesting so deep that recursion would run out of stack, or numbers with
too many digits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sage_grpo.utils.safe_io import regular

LARGEST = 2**63
"""Whole numbers from here on are refused; Python cannot even turn the largest into a float."""
MAX_DEPTH = 100
"""Largest nesting. The files of this package and of checkpoints have ten levels; Python's own limit depends on the caller."""
MAX_BYTES = 1 << 26
"""Largest JSON file, far above those of this package and of checkpoints."""


class DocumentError(ValueError):
    """A document that cannot be used; the message names the fault."""


def parse_json(text: str | bytes | bytearray, what: str = "the document") -> Any:
    try:
        content = json.loads(text)
    except RecursionError:
        raise DocumentError(f"{what} is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of more digits than Python converts
        raise DocumentError(f"{what} is not JSON: {' '.join(str(error).split())}.") from error
    # Brackets are counted first, because few of them cannot be deep: this runs for every row of a journal.
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > MAX_DEPTH and _is_deep(content):
        raise DocumentError(f"{what} is nested deeper than {MAX_DEPTH} levels.")
    return content


def finite(value: Any) -> Any:
    """A value in JSON's types: None for NaN and infinity, also inside lists and objects; a path is its text."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def read_json(file: Path) -> Any:
    """The content of a JSON file; a pipe, whose reader would wait, and a file beyond MAX_BYTES are refused."""
    size = regular(file).stat().st_size
    if size > MAX_BYTES:
        raise DocumentError(f"{file} has {size:,} bytes; a JSON file of at most {MAX_BYTES:,} bytes is read.")
    return parse_json(file.read_bytes(), str(file))


def read_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise DocumentError(f"{file} must hold an object ({{...}}), it holds {shown(content)}.")
    return content


def demand(document: Mapping[str, Any], kinds: Mapping[str, Any], what: str) -> None:
    """Refuse an object that lacks one of these keys, or has a value of another type there (types as in `misfit`)."""
    for key, kind in kinds.items():
        if key not in document:
            raise DocumentError(f"{what} lacks {key!r}.")
        if fault := misfit(document[key], kind, f"{what}: {key!r}"):
            raise DocumentError(fault)


def misfit(value: Any, hint: Any, where: str) -> str:
    """The first value in plain data that does not fit its type, as a sentence; empty if all fit.

    Types are int, float (any number), str, bool, None, list[T] (or Sequence[T]), dict[str, T], dict[int, T] (whose keys are spelled as texts), unions,
    Literal, Any, and dataclasses, whose fields may be left out where they have defaults. True and false are not numbers; neither are NaN, infinity,
    and integers of more than 64 bits.
    """
    if hint is Any or (value is None and hint in (None, type(None))):
        return ""
    origin, inner = _taken_apart(hint)
    if origin in (Union, types.UnionType):
        first = misfit(value, inner[0], where)
        return "" if not first or any(not misfit(value, one, where) for one in inner[1:]) else first
    if origin is Literal:
        return "" if value in inner else f"{where} must be one of {', '.join(map(str, inner))}, got {shown(value)}."
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _misfit_of_fields(value, hint, where)
    if origin in (dict, Mapping) and isinstance(value, dict):
        for key, item in value.items():
            if inner[0] is int and not (key.isascii() and key.isdigit() and len(key) < 16):
                return f"{where} must be by whole numbers, got {shown(key)}."
            if found := misfit(item, inner[1], f"{where}.{key}"):
                return found
        return ""
    if origin in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        return next((found for item in value if (found := misfit(item, inner[0], f"{where}[]"))), "")
    kind = origin or hint
    if kind in (int, float):
        fits = is_number(value) and (kind is float or isinstance(value, int))
    else:
        fits = isinstance(value, kind) if isinstance(kind, type) else value is None
    return "" if fits else f"{where} must be {NAMES.get(kind, str(kind))}, got {shown(value)}."


@cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of a type. Cached: a comparison has millions of values and a handful of types."""
    return get_origin(hint), get_args(hint)


def _misfit_of_fields(value: Any, kind: Any, where: str) -> str:
    if not isinstance(value, dict):
        return f"{where} must be an object, got {shown(value)}."
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    if strange := value.keys() - {field.name for field in fields}:
        return f"{where} has {shown(sorted(strange)[0])}, which this version does not know."
    for field in fields:
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name not in value and needed:
            return f"{where} lacks {field.name!r}."
        if field.name in value and (found := misfit(value[field.name], hints[field.name], f"{where}.{field.name}")):
            return found
    return ""


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -LARGEST < value < LARGEST if isinstance(value, int) else math.isfinite(value)


NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def shown(value: Any, most: int = 60) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[:most]}..."


def _is_deep(content: Any) -> bool:
    level: list[Any] = [[content]]
    for _ in range(MAX_DEPTH + 1):
        values = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in values if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True
