"""What a judge answered, as scores: strict JSON first, then any JSON object inside the text, and never a guess."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sage_grpo.documents import parse_json

_NUMBER = re.compile(r"\s*([-+]?\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?))?\s*")


LONGEST = 50_000
"""Signs of an answer that are looked at, from its end."""


class Unreadable(ValueError):
    """An answer that does not hold one score in range for every dimension."""


def read_answer(text: str, parts: Sequence[str], low: float, high: float) -> tuple[dict[str, float], dict[str, str]]:
    """Scores and reasons by dimension; Unreadable says what is wrong. Scores out of range are refused, not clamped."""
    text = text[-LONGEST:]
    found = _strict(text)
    if found is None:
        fitting = [one for one in _objects(text) if all(_pick(one, part) is not None for part in parts)]
        if not fitting:
            raise Unreadable(f"no JSON object with {', '.join(parts)} in the answer {_short(text)!r}")
        found = fitting[-1]  # models that think aloud write drafts first
    scores, reasons = {}, {}
    for part in parts:
        value = _pick(found, part)
        if value is None:
            raise Unreadable(f"the answer lacks {part!r}: {_short(text)!r}")
        score, reason = (value.get("score"), value.get("reason")) if isinstance(value, Mapping) else (value, None)
        scores[part] = _score(score, part, low, high)
        if isinstance(reason, str) and reason.strip():
            reasons[part] = " ".join(reason.split())
    return scores, reasons


def _strict(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _objects(text: str) -> list[dict[str, Any]]:
    """Every JSON object that stands in a text, in order."""
    decoder, place, found = json.JSONDecoder(), text.find("{"), []
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            found.append(value)
        place = text.find("{", end)
    return found


def _pick(found: Mapping[str, Any], part: str) -> Any:
    """The value under a dimension's name; case, spaces, dashes and underscores do not count."""
    names = {_plain(str(name)): value for name, value in found.items()}
    return names.get(_plain(part))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold())


def _score(value: Any, part: str, low: float, high: float) -> float:
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        if match[2] is not None and float(match[2]) != high:
            raise Unreadable(f"{part} is {value!r}, which is not on the scale from {low:g} to {high:g}")
        value = float(match[1])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unreadable(f"the score of {part} is no number: {_short(str(value))!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise Unreadable(f"{part} is {value:g}, outside of {low:g} to {high:g}")
    return float(value)


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= 200 else f"{plain[:200]}..."
