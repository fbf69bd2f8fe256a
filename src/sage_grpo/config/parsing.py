"""Command-line and YAML parsing of option dataclasses, with errors that name the nearest valid key or value."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from sage_grpo.config.errors import explain, groups, leaves, lists_parts
from sage_grpo.config.ranges import faults
from sage_grpo.utils.json_schema import read_json
from sage_grpo.utils.safe_io import CONTROL, regular

T = TypeVar("T")

MAX_YAML_BYTES, MAX_YAML_DEPTH = 1_000_000, 50  # far above any configuration
ANY = object()
_UNMEASURED = "no measurement showed its gain"
_ELSEWHERE = "a reward elsewhere is a server, sage-grpo serve-reward"
GONE: dict[str, tuple[Any, str]] = {
    "update.reuse": (0, "learning again from earlier rollouts did not help, research/results/README.md"),
    "anchor.skip_below": (ANY, "the reference's pass is never left out"),
    "model.packed": (True, "the stock forward of HunyuanVideo-1.5 was there to compare with only"),
    "model.decoder": (None, _UNMEASURED),
    "rollout.cheap.guidance": (None, _UNMEASURED),
    "rollout.cheap.negative_every": (1, _UNMEASURED),
    "rollout.cheap.cache": (None, _UNMEASURED),
    "rollout.cheap.cache_threshold": (0.08, _UNMEASURED),
    "rollout.cheap.cache_every": (2, _UNMEASURED),
    "rollout.cheap.attention": (None, _UNMEASURED),
    "rollout.window.stride": (1, "sliding windows move by one step"),
    "log.trackio": (None, "a class in log.sinks logs wherever you like, docs/extending.md"),
    "rollout.after_fraction": (1.0, "rollout.after_steps names the number of steps that stay"),
    "rollout.window.branches": (1, "a prompt draws one window; take more prompts"),
    "objective.frames": (None, "the whole clip is decoded"),
    "optimizer.max_lr_factor": (1.0, "the rate never exceeds optimizer.lr"),
    "trust_region.estimator": ("closed_form", "the KL is exact"),
    "rollout.ray.scores": ("workers", "workers score the clips that they sample"),
    "parallel.async_checkpoint": (ANY, "checkpoints are written at once"),
    "limits.max_batch": (ANY, "requests to a reward server are scored one after another"),
    "limits.max_wait_ms": (ANY, "requests to a reward server are scored one after another"),
    "data.formats": ([], "given clips are learned in the model's own format"),
    "bench": (None, "docs/bench-export.md names the clips of `generate` as VBench does"),
    "rewrites": (None, "docs/bench-export.md names the clips of `generate` as VBench does"),
    "profile": (None, "torch.profiler around Trainer.step records the same"),
    "doctor.probe": (None, "sage-grpo probe estimates the gradient's signal"),
    "rewards[].actors": (0, _ELSEWHERE),
    "rewards[].actor_gpus": (0.0, _ELSEWHERE),
    "rewards[].actor_cpus": (1.0, _ELSEWHERE),
    "rewards[].isolate_failures": (None, "an async function is never called again for clips that failed"),
    "rewards[].standardize": ({}, "divide the weight by the std; a mean changes no advantage"),
}
"""Removed options of training, with the value that switched them off (ANY: it changed no result) and the reason: files of
earlier runs name them."""
# PyYAML's errors for values that do not fit their tags: !!bool maybe, a date that does not exist.
MISBUILT = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message gives the remedy."""


def parse(options: type[T], argv: Sequence[str], *, prog: str, defaults: T | None = None, recipes: bool = False) -> T:
    """Fill an options dataclass from `--config file.yaml`, dotted overrides (`--optimizer.lr 1e-5`) and defaults.

    YAML wins over `defaults` (a recipe), the command line over YAML, left to right. With `recipes` the words and files may
    name a recipe, which the caller has applied to `defaults`.
    """
    plain = lists_of_parts(options) if defaults is None else dataclasses.asdict(defaults)  # type: ignore[call-overload]
    parser = new_parser(options, prog, recipes, plain)
    try:
        values = parser.parse_args(_friendly(argv, options))
        if wrong := list(faults(options, values)):  # here, because a part does not know its place in the whole
            raise ConfigError("\n".join(wrong))
        namespace = parser.instantiate_classes(values)
        return options(**{field.name: namespace[field.name] for field in dataclasses.fields(options)})  # type: ignore[arg-type]
    except ConfigError:
        raise
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(explain(str(error), options)) from error
    except OverflowError as error:
        raise ConfigError(f"A number among the options is larger than any of them takes ({error}).") from error


_PARSERS: dict[tuple[type, str, bool, str], Any] = {}
"""By all inputs: building a parser takes a tenth of a second, and a comparison parses the settings of every run."""


def new_parser(options: type, prog: str, recipes: bool, defaults: dict[str, Any]) -> Any:
    """A parser of the options with these defaults, made once."""
    key = (options, prog, recipes, repr(defaults))
    if key not in _PARSERS:
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(prog=prog, add_help=False, exit_on_error=False, default_env=False, allow_abbrev=False)
        parser.add_argument("--config", action="config")
        if recipes:
            parser.add_argument("--recipe", type=str | None)
        parser.add_class_arguments(options)
        parser.set_defaults(defaults)
        _PARSERS[key] = parser
    return _PARSERS[key]


def lists_of_parts(options: type) -> dict[str, list[dict[str, Any]]]:
    """Defaults that are lists of dataclasses, as plain data, because the parser cannot print them."""
    lists = {}
    for field in dataclasses.fields(options):
        value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            lists[field.name] = [dataclasses.asdict(item) for item in value]
    return lists


def _friendly(argv: Sequence[str], options: type) -> list[str]:
    """`--json` alone means `--json=true`; `--kernels sage flow` and `--kernels sage,flow` mean `--kernels=["sage", "flow"]`.

    The parser would merge equally long lists of dataclasses (rewards), item by item, so that a new reward would inherit
    the options of the recipe's: an empty list between the two prevents that.
    """
    kinds = {f"--{key}": kind for key, kind in leaves(options)}
    lists = [key for key, kind in kinds.items() if lists_parts(kind)]
    words, result = list(argv), []
    while words:
        word = words.pop(0)
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name, _, value = word.partition("=")
        value = values[0] if values else value
        if name not in kinds and name.removeprefix("--") in GONE:
            raise ConfigError(_gone(name.removeprefix("--")))
        if name in lists and value.endswith((".yaml", ".yml", ".json")):
            value = _parts_in_file(Path(value), name.removeprefix("--"))
            word, values = name, [value]
        if values or "=" in word:
            _refuse_mistakes(name, kinds.get(name), value, options)
        file = value if name == "--config" else ""
        result += [f"{key}=[]" for key in lists if name == key or (file and in_file(file, key.removeprefix("--")))]
        whole = _without_gone(file, kinds) if file else ""
        if whole:
            result.append(f"--config={whole}")
        elif kinds.get(word) in (bool, bool | None) and not values:
            result.append(f"{word}=true")
        elif kinds.get(word) == list[str] and values and not values[0].startswith("["):
            result.append(f"{word}={json.dumps([item for value in values for item in value.split(',')])}")
        elif len(values) == 1 and values[0].startswith("-"):
            result.append(f"{word}={values[0]}")  # the parser would take -1e-8 for an option
        else:
            result += [word, *values]
    return result


def _without_gone(file: str, kinds: Collection[str]) -> str:
    """A file of an earlier version as JSON, without the options that are gone; empty if it has none of them."""
    content, found = None, False
    with suppress(OSError):  # the parser reports a missing one
        content = read_yaml(Path(file))
    for key in (one for one in GONE if f"--{one}" not in kinds):
        *groups, name = key.split(".")
        parts = [content]
        for group in groups:
            inner = [part.get(group.removesuffix("[]")) for part in parts if isinstance(part, dict)]
            parts = [one for value in inner for one in (value if isinstance(value, list) else [value])]
        for part in (one for one in parts if isinstance(one, dict) and name in one):
            off, found = GONE[key][0], True
            if part.pop(name) != off and off is not ANY:
                raise ConfigError(_gone(key))
    return json.dumps(content, default=str) if found else ""


def _gone(key: str) -> str:
    return f"There is no option {key!r} any more ({GONE[key][1]}): leave it out."


def _parts_in_file(file: Path, key: str) -> str:
    """The list in a YAML or JSON file, alone or under its name (`rewards: [...]`), as a word of the command line."""
    if not file.is_file():
        raise ConfigError(f"--{key} {file}: there is no such file.")
    content = read_json(file) if file.suffix == ".json" else read_yaml(file, lists=True)
    if isinstance(content, dict):
        if list(content) != [key]:
            raise ConfigError(
                f"--{key} {file}: the file must hold a list, or {key}: [...] and nothing else, it holds {', '.join(map(str, content))}. "
                f"A whole configuration is given with --config {file}."
            )
        content = content[key]
    return json.dumps(content, default=str)


def loose_words(argv: Sequence[str], key: str, options: type) -> list[str]:
    """The words that belong to no option as the values of one: `a --watch b --port 1` means `--runs a b --watch --port 1`."""
    if any(word.partition("=")[0] == f"--{key}" for word in argv):
        return list(argv)
    switches = [f"--{name}" for name, kind in leaves(options) if kind is bool]
    loose, rest = list[str](), list[str]()
    for before, word in zip(["", *argv], argv):
        takes = before.startswith("--") and "=" not in before and (before not in switches or word in ("true", "false"))
        (rest if word.startswith("--") or takes else loose).append(word)
    return [f"--{key}", json.dumps(loose), *rest] if loose else rest


def given(argv: Sequence[str], key: str) -> str | None:
    """The last value of an option in the words, or in a YAML file among them."""
    last = None
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(argv[place + 1 : place + 2])
        if name == f"--{key}":
            last = value
        elif name == "--config" and in_file(value, key):
            last = str(_lookup(value, key))
    return last


def _refuse_mistakes(option: str, kind: Any, value: str, options: type) -> None:
    """Refuse unsafe YAML, an empty path, as from an unset shell variable (it would be the current folder), and groups of
    options in files of their own, which the parser would open."""
    name = option.removeprefix("--")
    if not value and kind in (Path, Path | None):
        raise ConfigError(f"{name} is empty: give a path, or leave it out.")
    is_part = any(isinstance(one, type) and dataclasses.is_dataclass(one) for one in (kind, *get_args(kind)))
    if option == "--config":
        for group in groups(options):
            inner = _lookup(value, group)
            if not isinstance(inner, dict | None):
                raise ConfigError(f"{value}: {group} must be a group of options, got {str(inner)[:100]!r}.")
    elif is_part and os.path.exists(value):
        raise ConfigError(f"{name} is a group of options: --{name}.NAME value or {{NAME: value}}; got {value!r}.")
    elif value.startswith(("{", "[")):
        fault = ""
        with suppress(yaml.YAMLError, *MISBUILT):  # the parser reports invalid YAML
            fault, _ = _built(value)
        if fault:
            raise ConfigError(f"{option} {fault}.")


def in_file(file: str, key: str) -> bool:
    """True if a YAML file sets a dotted key."""
    return _lookup(file, key) is not None


def _lookup(file: str, key: str) -> object:
    """The value of a dotted key in a YAML file, or None; the parser reports a missing file."""
    value: object = None
    with suppress(OSError):
        value = read_yaml(Path(file))
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_yaml(file: Path, *, lists: bool = False) -> Any:
    """The options in a YAML file, which may be untrusted; with `lists` also a list. ConfigError if it is something else, or
    larger than any configuration, which is checked before anything is built; OSError if it cannot be read."""
    size = regular(file).stat().st_size
    fault, content = f"it has {size} bytes, more than {MAX_YAML_BYTES}", None
    if size <= MAX_YAML_BYTES:
        try:
            fault, content = _built(file.read_text(encoding="utf-8"))
            fault = fault and f"it {fault}"
        except UnicodeDecodeError as error:
            fault = f"byte {error.object[error.start]:#04x} at {error.start} is not UTF-8"
        except (yaml.YAMLError, *MISBUILT) as error:
            fault = f"it is not valid YAML: {' '.join(str(error).replace('<unicode string>', file.name).split())}"
    if not fault and content is None:
        fault = "it is empty"
    if not fault and not isinstance(content, (dict, list) if lists else dict):
        fault = "it holds no options with values (name: value)"
    if fault:
        raise ConfigError(f"{file} is not a configuration: {fault}.")
    return copy.deepcopy(content)


@lru_cache(maxsize=8)
def _built(text: str) -> tuple[str, Any]:
    """The reason why a YAML text is refused, and its value. Cached, since a command reads the same file for fifty options."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            return f"is nested deeper than {MAX_YAML_DEPTH} levels", None
        if isinstance(event, yaml.AliasEvent):  # a few of them can stand for more than there is memory
            return f"has aliases (*{event.anchor}): write out the values", None
        if isinstance(event, yaml.ScalarEvent) and CONTROL.search(event.value):  # would reach the terminal
            return f"holds control characters: {event.value[:60]!r}", None
    return _fault_of_keys(yaml.compose(text, Loader=yaml.SafeLoader)), yaml.safe_load(text)


def _fault_of_keys(node: Any, prefix: str = "") -> str:
    """A key that is there twice, of which YAML silently takes the last, or one that YAML takes for true or false."""
    if isinstance(node, yaml.SequenceNode):
        return next(filter(None, (_fault_of_keys(item, prefix) for item in node.value)), "")
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            return f"has the key {name!r} twice (lines {lines[name]} and {line}): keep one of them"
        if key.tag == "tag:yaml.org,2002:bool":
            return f"has the key {key.value}, which YAML takes for true or false: put it in quotes ({key.value!r}: ...)"
        lines[name] = line
        if fault := _fault_of_keys(value, f"{name}."):
            return fault
    return ""
