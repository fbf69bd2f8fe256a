"""The help of a command, written from its options dataclass: an overview, and the options of a group on request."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from sage_grpo.config.errors import nearest_key
from sage_grpo.config.ranges import inner_dataclass, ranges

WIDTH = 80
"""Columns that every terminal has."""


@dataclass(frozen=True)
class HelpEntry:
    """An option, or a group of options, which has a dataclass."""

    key: str
    kind: Any
    text: str
    default: Any
    group: type | None


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Field -> the docstring literal under it, there or in a base class; Python's None becomes null, as in YAML and on the command line."""
    kinds = filter(dataclasses.is_dataclass, reversed(kind.__mro__))
    fields = (field for one in kinds for field in parse_from_object(one).params)
    return {one.arg_name: re.sub(r"\bNone\b", "null", " ".join((one.description or "").split())) for one in fields}


def entries(options: type, prefix: str = "", values: Any = None) -> Iterator[HelpEntry]:
    """Every option and group of a dataclass; `values` is an instance whose values are the defaults."""
    hints, docs, limits = get_type_hints(options), field_docs(options), ranges(options)
    for field in dataclasses.fields(options):
        kind = hints[field.name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if values is None else getattr(values, field.name)
        inner = inner_dataclass(kind)
        key = f"{prefix}{field.name}{'[]' if inner and get_origin(kind) is list else ''}"
        text = docs.get(field.name, "")
        if field.name in limits:
            text = f"{text} Must be {limits[field.name]}.".lstrip()
        yield HelpEntry(key, kind, text, default, inner)
        if inner is not None:
            yield from entries(inner, f"{key}.", default if isinstance(default, inner) else None)


def manual(
    options: type,
    topic: str,
    *,
    prog: str,
    about: str,
    values: Any = None,
    recipes: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """The help on a topic: "" is the overview, "all" every option, "recipes" the recipes, else a group or an option.

    `recipes` maps a heading to names with their meaning. ValueError names the nearest group or option.
    """
    every = list(entries(options, values=values))
    if topic == "recipes" and recipes:
        return "\n".join(line for heading, meanings in recipes.items() for line in (f"{heading}:", *_rows(meanings)))
    if topic == "all":
        return "\n".join(line for entry in every for line in _detail(entry))
    if topic:
        return _topic(topic.removeprefix("--"), every)
    usage = f"usage: {prog} {'[--recipe NAME] ' if recipes else ''}[--config FILE.yaml] [--option value ...]"
    rows = {"--recipe": "Start from a recipe; --help recipes lists them."} if recipes else {}
    rows["--config"] = "A YAML file with any of these options."
    rows["--print_config"] = "Print all options as YAML and stop."
    for entry in every:
        if "." not in entry.key and entry.group is None:
            rows[f"--{entry.key}"] = f"{entry.text.split('. ')[0].rstrip('.')}.{_default_in_words(entry.default)}"
    lines = [*_wrap(usage, 0), "", *_wrap(" ".join(about.split()), 0), "", "options:", *_rows(rows)]
    groups = {}
    for entry in every:
        if entry.group is not None:
            kinds = get_type_hints(entry.group).values()
            count = sum(not dataclasses.is_dataclass(inner_dataclass(kind)) for kind in kinds)
            groups[entry.key] = f"{entry.text.split('. ')[0].split(';')[0].rstrip('.')}. ({count})"
    if groups:
        lines += ["", "groups of options (--help GROUP lists one, --help all everything):", *_rows(groups)]
    return "\n".join(lines)


def _topic(topic: str, every: Sequence[HelpEntry]) -> str:
    names = [entry.key.replace("[]", "") for entry in every]
    tails = [name for name in names if name.rsplit(".", 1)[-1] == topic]
    chosen = topic if topic in names else tails[0] if len(tails) == 1 else ""
    if not chosen:
        near = nearest_key(topic, names)
        groups = ", ".join(entry.key.replace("[]", "") for entry in every if entry.group is not None)
        raise ValueError(
            f"There is no option or group {topic!r}."
            + (f" Did you mean --help {near}?" if near else "")
            + (f" Groups: {groups}." if groups else "")
        )
    inside = [entry for entry, name in zip(every, names) if f"{name}.".startswith(f"{chosen}.")]
    return "\n".join(line for entry in inside for line in _detail(entry))


def _detail(entry: HelpEntry) -> list[str]:
    if entry.group is not None:
        many = " A list of these, as YAML or JSON." if entry.key.endswith("[]") else ""
        absent = " (none)" if entry.default is None else ""
        return ["", *_wrap(f"{entry.key}{absent}: {entry.text}{many}", 0)]
    head = f"  --{entry.key} {kind_in_words(entry.kind)}{_default_in_words(entry.default)}"
    return [*_wrap(head, 6, first=0), *_wrap(entry.text, 6)]


def kind_in_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (Union, types.UnionType):
        return "|".join("null" if one is type(None) else kind_in_words(one) for one in inner)
    if origin in (list, tuple):
        return f"[{kind_in_words(inner[0])},...]"
    if origin is dict:
        return f"{{NAME: {kind_in_words(inner[1])}}}"
    return {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", Any: "ANY"}.get(kind, "PATH")


def _default_in_words(value: Any) -> str:
    if value is dataclasses.MISSING:
        return " (needed)"
    if value is None or value == "" or value == [] or value == {}:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f" ({text})"


def _rows(meanings: Mapping[str, str]) -> list[str]:
    width = max(map(len, meanings), default=0)
    return [line for name, text in meanings.items() for line in _wrap(f"  {name:<{width}}  {text}", width + 4, first=0)]


def _wrap(text: str, indent: int, first: int | None = None) -> list[str]:
    start = " " * (indent if first is None else first)
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False)
