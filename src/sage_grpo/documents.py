"""JSON that somebody else may have written: the one place where it is read, so that nothing behind it meets what no program writes.

A file that is damaged or made to do harm ends in a DocumentError of one line: no JSON, nested so deeply that whoever walks through it
runs out of stack, or numbers with more digits than anything holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Objects inside objects. The files of this package and of checkpoints have ten; Python's own limit depends on who calls."""


class DocumentError(ValueError):
    """A document that cannot be used; the message says what is wrong with it."""


def parse_json(text: str | bytes | bytearray, what: str = "the document") -> Any:
    """What a JSON text holds; `what` is what errors call it."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise DocumentError(f"{what} is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of more digits than Python converts
        raise DocumentError(f"{what} is not JSON: {' '.join(str(error).split())}.") from error
    # Brackets are counted first, because few of them cannot be deep: this is done for every row of a journal.
    opened = sum(text.count(sign) for sign in ((b"[", b"{") if isinstance(text, (bytes, bytearray)) else ("[", "{")))
    if opened > MAX_DEPTH and _is_deep(content):
        raise DocumentError(f"{what} is nested deeper than {MAX_DEPTH} levels.")
    return content


def read_json(file: Path) -> Any:
    """What a JSON file holds."""
    return parse_json(file.read_bytes(), str(file))


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file holds that must hold an object."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise DocumentError(f"{file} must hold an object ({{...}}), it holds {shown(content)}.")
    return content


def demand(document: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    """Refuse an object that lacks one of these keys, or has something of another kind there; true and false are no numbers."""
    for key, kind in kinds.items():
        if key not in document:
            raise DocumentError(f"{what} lacks {key!r}.")
        value = document[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = " or ".join(NAMES.get(one, one.__name__) for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise DocumentError(f"{what}: {key!r} must be {wanted}, got {shown(value)}.")


NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def shown(value: Any, most: int = 60) -> str:
    """A value as an error shows it: short, and in one line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[:most]}..."


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
