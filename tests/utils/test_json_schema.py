"""JSON of others: what no program writes is refused in one line, whatever it is, and what programs write is read."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from sage_grpo.utils.json_schema import (
    MAX_DEPTH,
    DocumentError,
    demand,
    is_number,
    misfit,
    parse_json,
    read_json,
    read_object,
)


def nested(levels: int, closed: bool = True) -> str:
    return "[" * levels + "]" * levels * closed


OTHERS = ("[]", "null", "1", '"x"')
"""JSON that is no object."""


@pytest.mark.parametrize(
    "text", ["", "{", "{'a': 1}", "\ufffe", "1" * 5000, nested(200_000), nested(200_000, closed=False), *OTHERS]
)
def test_what_is_no_json_is_refused_in_one_line(text: str, tmp_path) -> None:
    file = tmp_path / "given.json"
    file.write_text(text)
    whole = (lambda: parse_json(text, "given.json"), lambda: read_json(file))
    for call in (lambda: read_object(file), *(() if text in OTHERS else whole)):
        with pytest.raises(DocumentError, match=r"given\.json") as refused:
            call()
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize("wrap", [lambda text: text, str.encode, lambda text: bytearray(text.encode())])
def test_depth_is_limited_whoever_calls(wrap: Any) -> None:
    """Python's own limit depends on how deep the caller is; who walks through a document must not run out of stack."""
    for text in (nested(MAX_DEPTH), f"[{nested(MAX_DEPTH - 1)}, []]"):
        assert parse_json(wrap(text)) is not None
    for text in (nested(MAX_DEPTH + 1), '{"a": {"b":' + nested(MAX_DEPTH - 1) + "}}"):
        with pytest.raises(DocumentError, match="nested"):
            parse_json(wrap(text))
    with pytest.raises(DocumentError):
        parse_json(b"\xff\x00\x81")  # no text


def test_many_brackets_are_not_deep() -> None:
    wide = json.dumps([[], {}, "[" * 500] * 1000)
    assert parse_json(wide) == json.loads(wide)


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (1, int, True), (1, float, True), (1.5, float, True), (None, int | None, True), (True, bool, True),
        (True, int, False), (False, float, False), (1.5, int, False), ("1", int, False), (None, int, False),
        (math.nan, float, False), (-math.inf, float, False), (10**400, float, False), (2**63, int, False),
        ({}, dict, True), ([], dict, False), ("x", str, True),
    ],
)  # fmt: skip
def test_values_are_of_their_kind(value: object, kind: Any, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(DocumentError, match="given: 'a' must be"):
        demand({"a": value}, {"a": kind}, "given")


def test_a_key_that_is_not_there_is_named() -> None:
    with pytest.raises(DocumentError, match="lacks 'b'"):
        demand({"a": 1}, {"a": int, "b": int}, "given")


def test_numbers_can_be_computed_with() -> None:
    assert all(map(is_number, (0, -1, 1.5, 2**62)))
    assert not any(map(is_number, (True, None, "1", math.nan, math.inf, 10**400, -(2**63))))


@dataclass
class Inner:
    """A part."""

    name: str
    score: float | None = None


@dataclass
class Outer:
    """A whole."""

    parts: tuple[Inner, ...]
    kind: Literal["a", "b"] = "a"
    seeds: tuple[int, ...] | None = None
    by_point: dict[int, dict[str, float | None]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    on: bool = True


WHOLE = {
    "parts": [{"name": "x", "score": 1}],
    "kind": "b",
    "seeds": [1],
    "by_point": {"0": {"t": None}},
    "options": {"x": [1]},
}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({}, ""), ({"parts": []}, ""),
        ({"parts": None}, "given.parts"), ({"parts": [1]}, "given.parts"), ({"parts": [{}]}, "lacks 'name'"),
        ({"parts": [{"name": 1}]}, "name"), ({"parts": [{"name": "x", "score": "1"}]}, "score"),
        ({"parts": [{"name": "x", "score": math.nan}]}, "score"), ({"kind": "c"}, "given.kind"), ({"kind": []}, "given.kind"),
        ({"seeds": [1.5]}, "given.seeds"), ({"seeds": [True]}, "given.seeds"), ({"seeds": "12"}, "given.seeds"),
        ({"by_point": {"x": {}}}, "given.by_point"), ({"by_point": {"0": []}}, "given.by_point.0"),
        ({"by_point": {"0": {"t": 10**400}}}, "given.by_point.0.t"), ({"by_point": {"9" * 5000: {}}}, "given.by_point"),
        ({"on": 1}, "given.on"), ({"other": 1}, "other"), ({"options": []}, "given.options"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_place(change: dict[str, Any], where: str) -> None:
    said = misfit({**WHOLE, **change}, Outer, "given")
    assert where in said
    assert where or not said
