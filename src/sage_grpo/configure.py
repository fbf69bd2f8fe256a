"""Command-line and YAML parsing of option dataclasses, with errors that name the nearest valid key or value."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sage_grpo.ranges import faults, ranges

T = TypeVar("T")

MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_VALUES = 1_000_000, 50, 100_000
"""Far more than any configuration needs."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what to change."""


def parse(options: type[T], argv: Sequence[str], *, prog: str, description: str = "", defaults: T | None = None) -> T:
    """Fill an options dataclass from `--config file.yaml`, dotted overrides (`--optimizer.lr 1e-5`) and defaults.

    `defaults` is a whole instance (a recipe); YAML wins over it, the command line wins over YAML, left to right.
    """
    from jsonargparse import ArgumentParser
    from jsonargparse import set_parsing_settings as settings

    class Parser(ArgumentParser):
        """Ends the help of a field with its range."""

        def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
            added = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
            limits = dict(ranges(theclass, f"{nested_key}." if nested_key else ""))
            for action in self._actions:
                if action.dest in limits:
                    action.help = f"{(action.help or '').rstrip()} Must be {limits[action.dest]}.".lstrip()
            return added

    settings(docstring_parse_attribute_docstrings=True)
    parser = Parser(prog=prog, description=description, exit_on_error=False, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="A YAML file with any of the options below.")
    parser.add_class_arguments(options)  # type: ignore[type-var]
    if defaults is not None:
        parser.set_defaults(dataclasses.asdict(defaults))  # type: ignore[call-overload]
    try:
        given = parser.parse_args(_friendly(argv, options))
        wrong = list(faults(options, given))  # here, because a part does not know its place in the whole
        if wrong:
            raise ConfigError("\n".join(wrong))
        namespace = parser.instantiate_classes(given)
        return options(**{field.name: namespace[field.name] for field in dataclasses.fields(options)})  # type: ignore[arg-type]
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(explain(str(error), options)) from error


def _friendly(argv: Sequence[str], options: type) -> list[str]:
    """`--json` alone means `--json=true`; `--kernels sage flow` and `--kernels sage,flow` mean `--kernels=["sage", "flow"]`.

    A list of dataclasses (rewards) replaces the one before: the parser would merge equally long lists, item by item, and a
    new reward would inherit the options of the recipe's. An empty list between the two prevents that.
    """
    kinds = {f"--{key}": kind for key, kind in leaves(options)}
    lists = [
        key for key, kind in kinds.items() if get_origin(kind) is list and dataclasses.is_dataclass(*get_args(kind))
    ]
    words, result = list(argv), []
    while words:
        word = words.pop(0)
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name, _, value = word.partition("=")
        if values or "=" in word:
            _refuse_mistakes(name, kinds.get(name), (values or [value])[0])
        file = (values or [value])[0] if name == "--config" else ""
        if file:
            check_yaml(Path(file))
        result += [f"{key}=[]" for key in lists if name == key or (file and _holds(file, key.removeprefix("--")))]
        if kinds.get(word) in (bool, bool | None) and not values:
            result.append(f"{word}=true")
        elif kinds.get(word) == list[str] and values and not values[0].startswith("["):
            result.append(f"{word}={json.dumps([item for value in values for item in value.split(',')])}")
        elif len(values) == 1 and values[0].startswith("-"):
            result.append(f"{word}={values[0]}")  # the parser takes -1e-8 for an option
        else:
            result += [word, *values]
    return result


def given(argv: Sequence[str], key: str) -> str | None:
    """What the words, or a YAML file among them, say about an option that others take their defaults from; the last one counts."""
    found = None
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(argv[place + 1 : place + 2])
        if name == f"--{key}":
            found = value
        elif name == "--config" and _holds(value, key):
            found = str(_lookup(value, key))
    return found


def _refuse_mistakes(option: str, kind: Any, value: str) -> None:
    """Refuse a key that is given twice, of which YAML takes the last in silence, and a path that is empty, as from a shell
    variable that is not set: it would be the current folder."""
    import yaml

    if not value and kind in (Path, Path | None):
        raise ConfigError(f"{option.removeprefix('--')} is empty: give a path, or leave it out.")
    is_part = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    is_file = option == "--config" or (is_part and Path(value).is_file())
    if not is_file and not value.startswith(("{", "[")):
        return
    try:
        twice = _twice(yaml.compose(Path(value).read_text() if is_file else value, Loader=yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return  # what cannot be read is the parser's to complain about
    if twice:
        raise ConfigError(f"{value if is_file else option} has {twice}: keep one of them.")


def _twice(node: Any, prefix: str = "") -> str | None:
    """The first key of a YAML tree that is there twice, with both lines."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return next((found for item in node.value if (found := _twice(item, prefix))), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            return f"the key {name!r} twice (lines {lines[name]} and {line})"
        lines[name] = line
        found = _twice(value, f"{name}.")
        if found:
            return found
    return None


def _holds(file: str, key: str) -> bool:
    """Whether a YAML file sets a dotted key."""
    return _lookup(file, key) is not _NOTHING


_NOTHING = object()


def _lookup(file: str, key: str) -> object:
    """The value of a dotted key in a YAML file, or _NOTHING; a file that cannot be read is the parser's to complain about."""
    import yaml

    check_yaml(Path(file))
    try:
        value = yaml.safe_load(Path(file).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return _NOTHING
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _NOTHING
        value = value[part]
    return value


def check_yaml(file: Path) -> None:
    """Refuse a file that is small on disk and enormous in memory, before anything builds it.

    What is no YAML at all is the parser's to complain about.
    """
    import yaml

    try:
        if file.is_file() and file.stat().st_size > MAX_YAML_BYTES:
            fault = f"it has {file.stat().st_size} bytes, more than {MAX_YAML_BYTES}"
        else:
            fault = _yaml_fault(yaml.parse(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    if fault:
        raise ConfigError(f"{file} is no configuration: {fault}.")


def _yaml_fault(events: Iterable[Any]) -> str:
    """Counts what aliases (`*name`) stand for without expanding them; stops reading at the first excess."""
    import yaml

    sizes: dict[str, int] = {}
    stack: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, 1))
            if len(stack) > MAX_YAML_DEPTH:
                return f"it is nested deeper than {MAX_YAML_DEPTH} levels"
            continue
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                return f"*{event.anchor} refers to itself or to nothing"
            name, size = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            name, size = event.anchor, 1
        elif isinstance(event, yaml.CollectionEndEvent):
            name, size = stack.pop()
        else:
            continue
        if name is not None:
            sizes[name] = size
        stack[-1] = (stack[-1][0], stack[-1][1] + size)
        if stack[-1][1] > MAX_YAML_VALUES:
            return f"with its aliases it holds more than {MAX_YAML_VALUES} values"
    return ""


def explain(message: str, options: type) -> str:
    """Add the nearest valid key or value to a parser's message."""
    keys = dict(leaves(options))
    unknown = re.search(r"unrecognized arguments?: (?:--)?([\w.+-]+)", message) or re.search(
        r"[Kk]ey ['\"]?([\w.]+)['\"]? is not expected", message
    )
    group = re.search(r"Group '([\w.]+)' does not accept (?:option|nested key) '([\w.]+)'", message)
    hints = []
    if unknown:
        hints = _nearest_key(unknown.group(1).split("=")[0], list(keys))
    elif group:
        hints = _nearest_key(f"{group.group(1)}.{group.group(2)}", list(keys))
    else:
        literal = re.search(r"Expected a (?:typing\.)?Literal\[(.+?)\]. Got value: (\S+)", message)
        if literal:
            choices = [choice.strip(" '\"") for choice in literal.group(1).split(",")]
            hints = difflib.get_close_matches(literal.group(2), choices, n=1, cutoff=0.5)
    text = message.strip()
    return f"{text}\nDid you mean {hints[0]!r}?" if hints else text


def leaves(options: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of an options dataclass with its type."""
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        key, kind = prefix + field.name, hints[field.name]
        yield key, kind
        for inner in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                yield from leaves(inner, key + ".")


def _nearest_key(given: str, keys: list[str]) -> list[str]:
    """The nearest whole key, else the nearest by its last part (people forget the prefix)."""
    near = difflib.get_close_matches(given, keys, n=1, cutoff=0.75)
    if near:
        return near
    tails = {key.rsplit(".", 1)[-1]: key for key in keys}
    tail = difflib.get_close_matches(given.rsplit(".", 1)[-1], tails, n=1, cutoff=0.6)
    return [tails[tail[0]]] if tail else []
