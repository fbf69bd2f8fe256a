"""Command-line and YAML parsing of option dataclasses, with errors that name the nearest valid key or value."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from sage_grpo.config.errors import explain, groups, leaves
from sage_grpo.config.ranges import faults
from sage_grpo.utils.json_schema import read_json
from sage_grpo.utils.safe_io import CONTROL, regular

__all__ = ["ConfigError", "check_yaml", "explain", "given", "leaves", "parse", "read_yaml"]

T = TypeVar("T")

MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_VALUES = 1_000_000, 50, 100_000
"""Limits far above any configuration."""


GONE = {
    "update.reuse": (0, "learning again from earlier rollouts did not help, research/results/reuse.md"),
    "anchor.skip_below": (0.0, "leaving out the reference's pass saved less than 5% at full size"),
}
"""Removed options, with the value that switched them off and the reason: files of earlier runs name them."""
MISBUILT = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""PyYAML's errors for values that do not fit their tags: !!bool maybe, a date that does not exist."""


ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
"""Numbers that YAML 1.1 reads to the base of 8 (010) or 60 (1:30)."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message gives the remedy."""


def parse(options: type[T], argv: Sequence[str], *, prog: str, defaults: T | None = None, recipes: bool = False) -> T:
    """Fill an options dataclass from `--config file.yaml`, dotted overrides (`--optimizer.lr 1e-5`) and defaults.

    `defaults` is a whole instance (a recipe); YAML wins over it, the command line wins over YAML, left to right. With `recipes` the words and files
    may name a recipe, which the caller has applied to `defaults`.
    """
    plain = _lists_of_parts(options) if defaults is None else dataclasses.asdict(defaults)  # type: ignore[call-overload]
    parser = _parser(options, prog, recipes, plain)
    try:
        given = parser.parse_args(_friendly(argv, options))
        _leave_out_gone(given)
        wrong = list(faults(options, given))  # here, because a part does not know its place in the whole
        if wrong:
            raise ConfigError("\n".join(wrong))
        namespace = parser.instantiate_classes(given)
        return options(**{field.name: namespace[field.name] for field in dataclasses.fields(options)})  # type: ignore[arg-type]
    except ConfigError:
        raise
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(explain(str(error), options)) from error
    except OverflowError as error:
        raise ConfigError(f"A number among the options is larger than any of them takes ({error}).") from error


_PARSERS: dict[tuple[type, str, bool, str], Any] = {}
"""Parsers by all of their inputs: building one takes a tenth of a second, and a comparison parses the settings of every run."""


def _parser(options: type, prog: str, recipes: bool, defaults: dict[str, Any]) -> Any:
    """A parser of the options with these defaults, made once. Parsing changes nothing in it."""
    key = (options, prog, recipes, repr(defaults))
    if key not in _PARSERS:
        parser = _PARSERS[key] = new_parser(options, prog, recipes)
        for gone, (off, _) in GONE.items():
            if gone.rpartition(".")[0] in groups(options):
                parser.add_argument(f"--{gone}", type=type(off), default=argparse.SUPPRESS)
        parser.set_defaults(defaults)
    return _PARSERS[key]


def new_parser(options: type, prog: str, recipes: bool) -> Any:
    """A parser of the options, with `--config` and, where a command has recipes, `--recipe`."""
    from jsonargparse import ArgumentParser
    from jsonargparse import set_parsing_settings as settings

    settings(docstring_parse_attribute_docstrings=False)  # help.py writes the help
    parser = ArgumentParser(prog=prog, add_help=False, exit_on_error=False, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    if recipes:
        parser.add_argument("--recipe", type=str | None)
    parser.add_class_arguments(options)
    return parser


def _leave_out_gone(given: Any) -> None:
    """Drop removed options; refuse one that is not off."""
    for key, (off, why) in GONE.items():
        if key in given and given.pop(key) != off:
            raise ConfigError(f"There is no option {key!r} any more ({why}): leave it out.")


def _lists_of_parts(options: type) -> dict[str, list[dict[str, Any]]]:
    """Defaults that are lists of dataclasses, as plain data, because the parser cannot print them."""
    made = {
        field.name: field.default_factory()
        for field in dataclasses.fields(options)
        if field.default_factory is not dataclasses.MISSING
    }
    return {
        name: [dataclasses.asdict(item) for item in value]
        for name, value in made.items()
        if isinstance(value, list) and value and dataclasses.is_dataclass(value[0])
    }


def _friendly(argv: Sequence[str], options: type) -> list[str]:
    """`--json` alone means `--json=true`; `--kernels sage flow` and `--kernels sage,flow` mean `--kernels=["sage", "flow"]`.

    A list of dataclasses (rewards) replaces the one before: the parser would merge equally long lists, item by item, and a
    new reward would inherit the options of the recipe's. An empty list between the two prevents that.
    """
    kinds = {f"--{key}": kind for key, kind in leaves(options)}
    lists = [
        key for key, kind in kinds.items() if get_origin(kind) is list and dataclasses.is_dataclass(get_args(kind)[0])
    ]
    words, result = list(argv), []
    while words:
        word = words.pop(0)
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name, _, value = word.partition("=")
        value = values[0] if values else value
        if name in lists and value.endswith((".yaml", ".yml", ".json")):
            value = _parts_in_file(Path(value), name.removeprefix("--"))
            word, values = name, [value]
        if values or "=" in word:
            _refuse_mistakes(name, kinds.get(name), value, options)
        file = value if name == "--config" else ""
        result += [f"{key}=[]" for key in lists if name == key or (file and in_file(file, key.removeprefix("--")))]
        if kinds.get(word) in (bool, bool | None) and not values:
            result.append(f"{word}=true")
        elif kinds.get(word) == list[str] and values and not values[0].startswith("["):
            result.append(f"{word}={json.dumps([item for value in values for item in value.split(',')])}")
        elif len(values) == 1 and values[0].startswith("-"):
            result.append(f"{word}={values[0]}")  # the parser would take -1e-8 for an option
        else:
            result += [word, *values]
    return result


def _parts_in_file(file: Path, key: str) -> str:
    """The list in a YAML or JSON file that holds nothing else, alone or under its name (`rewards: [...]`), as a word of the command line."""
    if not file.is_file():
        raise ConfigError(f"--{key} {file}: there is no such file.")
    content = read_json(file) if file.suffix == ".json" else read_yaml(file, lists=True)
    _refuse_twice(str(file), file.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        if list(content) != [key]:
            raise ConfigError(
                f"--{key} {file}: the file must hold a list, or {key}: [...] and nothing else, it holds {', '.join(map(str, content))}. "
                f"A whole configuration is given with --config {file}."
            )
        content = content[key]
    return json.dumps(content, default=str)


def loose_words(argv: Sequence[str], key: str, options: type) -> list[str]:
    """The words that belong to no option as the values of one: `a --watch b --port 1` means `--runs a b --watch --port 1`.

    A word belongs to the option before it, unless that is a switch and the word neither true nor false.
    """
    if any(word.partition("=")[0] == f"--{key}" for word in argv):
        return list(argv)
    switches = [f"--{name}" for name, kind in leaves(options) if kind is bool]
    loose: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *argv], argv):
        takes = before.startswith("--") and "=" not in before and (before not in switches or word in ("true", "false"))
        (rest if word.startswith("--") or takes else loose).append(word)
    return [f"--{key}", json.dumps(loose), *rest] if loose else rest


def given(argv: Sequence[str], key: str) -> str | None:
    """The value in the words, or in a YAML file among them, of an option that gives others their defaults; the last one counts."""
    found = None
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(argv[place + 1 : place + 2])
        if name == f"--{key}":
            found = value
        elif name == "--config" and in_file(value, key):
            found = str(_lookup(value, key))
    return found


def _refuse_mistakes(option: str, kind: Any, value: str, options: type) -> None:
    """Refuse unsafe YAML, a key that is given twice (YAML silently takes the last), and an empty path, as from an unset shell variable: it would be
    the current folder."""
    import yaml

    if not value and kind in (Path, Path | None):
        raise ConfigError(f"{option.removeprefix('--')} is empty: give a path, or leave it out.")
    is_part = any(isinstance(one, type) and dataclasses.is_dataclass(one) for one in (kind, *get_args(kind)))
    if option == "--config" or (is_part and os.path.exists(value)):
        file = Path(value)
        check_yaml(file)
        prefix = "" if option == "--config" else f"{option.removeprefix('--')}."
        _check_files_of_parts(file, [part.removeprefix(prefix) for part in groups(options) if part.startswith(prefix)])
        if file.is_file():
            _refuse_twice(str(file), file.read_text(encoding="utf-8"))
    elif value.startswith(("{", "[")):
        with suppress(yaml.YAMLError):  # the parser reports invalid YAML
            fault = _yaml_fault(value)
            if fault:
                raise ConfigError(f"{option} cannot be used: {fault}.")
        _refuse_twice(option, value)
    elif ODD_NUMBER.fullmatch(value) and not value.startswith("0") and _takes_numbers(kind):
        raise ConfigError(f"{option} {_misread(value)}.")


def _refuse_twice(name: str, text: str) -> None:
    twice = _twice(text)
    if twice:
        raise ConfigError(f"{name} has {twice}: keep one of them.")


def _takes_numbers(kind: Any) -> bool:
    return kind in (int, float) or any(map(_takes_numbers, get_args(kind)))


def _check_files_of_parts(file: Path, parts: Sequence[str]) -> None:
    """Apply the same limits to files that groups of options name, which the parser opens, also from other files."""
    for part in parts:
        value = _lookup(str(file), part)
        if isinstance(value, str) and os.path.exists(file.parent / value):
            check_yaml(file.parent / value)
            prefix = f"{part}."
            inner = [one.removeprefix(prefix) for one in parts if one.startswith(prefix)]
            _check_files_of_parts(file.parent / value, inner)


def _twice(text: str) -> str:
    """The first key of a YAML text that is there twice, with both lines; empty without one, and for invalid YAML, which the parser reports. An alias
    is the same node, and checked once."""
    import yaml

    try:
        waiting = [("", yaml.compose(text, Loader=yaml.SafeLoader))]
    except yaml.YAMLError:
        return ""
    seen = set()
    while waiting:
        prefix, node = waiting.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(prefix, item) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = f"{prefix}{key.value if isinstance(key.value, str) else '?'}", key.start_mark.line + 1
                if name in lines:
                    return f"the key {name!r} twice (lines {lines[name]} and {line})"
                lines[name] = line
                waiting.append((f"{name}.", value))
    return ""


def in_file(file: str, key: str) -> bool:
    """True if a YAML file sets a dotted key."""
    return _lookup(file, key) is not _NOTHING


_NOTHING = object()


def _lookup(file: str, key: str) -> object:
    """The value of a dotted key in a YAML file, or _NOTHING; the parser reports a missing file."""
    try:
        value: object = read_yaml(Path(file))
    except OSError:
        return _NOTHING
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _NOTHING
        value = value[part]
    return value


def read_yaml(file: Path, *, lists: bool = False) -> Any:
    """The options in a YAML file, which may be untrusted; with `lists` also a list. ConfigError if it is not YAML of options with values, or is
    enormous once expanded, which is checked before anything is built. OSError if it cannot be read."""
    import yaml

    size = file.stat().st_size if regular(file).is_file() else 0
    fault, content = f"it has {size} bytes, more than {MAX_YAML_BYTES}", None
    if size <= MAX_YAML_BYTES:
        try:
            fault, content = _built(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            fault = f"byte {error.object[error.start]:#04x} at {error.start} is not UTF-8"
        except (yaml.YAMLError, *MISBUILT) as error:
            words = " ".join(str(error).replace("<unicode string>", file.name).split())
            fault = _tab(getattr(error, "problem_mark", None)) or f"it is not valid YAML: {words}"
    if not fault and content is None:
        fault = "it is empty"
    if not fault and not isinstance(content, (dict, list) if lists else dict):
        fault = "it holds no options with values (name: value)"
    if fault:
        raise ConfigError(f"{file} is not a configuration: {fault}.")
    return copy.deepcopy(content)


def _tab(mark: Any) -> str:
    """A hint at the tab in the line where YAML stopped reading; empty without one."""
    line = "" if mark is None or mark.buffer is None else mark.buffer.split("\n")[mark.line]
    return f"line {mark.line + 1} uses a tab, which YAML does not take: put spaces in its place" if "\t" in line else ""


@lru_cache(maxsize=8)
def _built(text: str) -> tuple[str, Any]:
    """The fault of a YAML text, and its value. Cached, since a command reads the same file for fifty options."""
    import yaml

    fault = _yaml_fault(text)
    content = None if fault else yaml.safe_load(text)
    waiting = [content]
    while waiting and not fault:
        one = waiting.pop()
        if isinstance(one, dict) and any(isinstance(key, bool) for key in one):
            fault = 'YAML takes the keys on, off, yes and no for true and false: put them in quotes ("on": ray)'
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return fault, content


def check_yaml(file: Path) -> None:
    """Refuse a file that `read_yaml` refuses; the parser reports a missing one."""
    with suppress(OSError):
        read_yaml(file)


def _yaml_fault(text: str) -> str:
    """The reason why a YAML text must not be built; empty if it may be. Raises yaml.YAMLError if it is not valid YAML."""
    import yaml

    return _excess(yaml.parse(text, Loader=yaml.SafeLoader))


def _misread(value: str) -> str:
    """An error for a number that YAML reads to the base of 8 or 60."""
    import yaml

    return f"{value[:60]} is the number {yaml.safe_load(value)} in YAML: write that, or a text in quotes"


def _excess(events: Iterable[Any]) -> str:
    """The first exceeded limit, or an empty string; counts the values behind aliases (`*name`) without expanding them."""
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
            if CONTROL.search(event.value):  # commands print options, and control characters would reach the terminal
                return f"it holds control characters: {event.value[:60]!r}"
            if event.implicit[0] and ODD_NUMBER.fullmatch(event.value):
                return _misread(event.value)
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
