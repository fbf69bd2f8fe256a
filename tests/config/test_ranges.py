"""Every number of every command's options has a range; values outside are refused, by name, before anything runs."""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from sage_grpo.cli.main import COMMANDS
from sage_grpo.config.parsing import ConfigError, parse
from sage_grpo.config.ranges import Range, Seconds
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import OptimizerConfig, TrainConfig


def dataclasses_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from dataclasses_in(inner)
    for inner in get_args(hint):
        yield from dataclasses_in(inner)


OPTIONS = [importlib.import_module(f"sage_grpo.cli.{command.module}").Options for command in COMMANDS.values()]
PARTS = list(dict.fromkeys(part for options in OPTIONS for part in dataclasses_in(options)))
NEEDED = {"name": "x", "path": "x", "part": "x", "floor": 0.0, "rewards": [RewardSpec(name="x")]}


def instance(part: type) -> Any:
    """An instance with all its defaults; of words that must be given, the first."""
    hints = get_type_hints(part)
    return part(
        **{
            field.name: NEEDED[field.name] if field.name in NEEDED else get_args(hints[field.name])[0]
            for field in dataclasses.fields(part)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
    )


def numbers(hint: Any, *, ranged: bool = False) -> Iterator[tuple[type, bool]]:
    if hint in (int, float):
        yield hint, ranged
    origin = get_origin(hint)
    if origin is Annotated:
        yield from numbers(get_args(hint)[0], ranged=any(isinstance(one, Range) for one in get_args(hint)[1:]))
    elif origin in (Union, types.UnionType, list, tuple, dict):
        for inner in get_args(hint):
            yield from numbers(inner)


def broken(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return value if inner[0] is float else -(2**70) if inner[0] is int else broken(inner[0], value)
    if origin in (Union, types.UnionType):
        return broken(inner[0], value)
    if origin is dict:
        return {"part": broken(inner[1], value)}
    return (broken(inner[0], value),) * (2 if origin is tuple else 1)


def test_every_number_has_a_range_that_is_checked() -> None:
    assert {TrainConfig, OptimizerConfig, RewardSpec} <= set(PARTS)
    for part in PARTS:
        hints, good = get_type_hints(part, include_extras=True), instance(part)
        for field in dataclasses.fields(part):
            kinds = list(numbers(hints[field.name]))
            assert all(ranged for _, ranged in kinds), (
                f"give {part.__name__}.{field.name} a range (sage_grpo/config/ranges.py)"
            )
            for value in (math.nan, math.inf, -math.inf) if kinds else ():
                with pytest.raises(ValueError, match=rf"{part.__name__}\.{field.name}.* must be .*, got"):
                    dataclasses.replace(good, **{field.name: broken(hints[field.name], value)})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kernel.eta", "50"], "kernel.eta must be in [0, 10], got 50"),
        (["--kernel.name", "cps", "--kernel.eta", "5"], "kernel.eta must be in [0, 1], got 5"),
        (["--optimizer.betas", "[0.9, 1.0]"], "optimizer.betas[1] must be in [0, 1), got 1.0"),
        (["--out", ""], "out must be not empty, got ''"),
        (["--rewards", '[{"name": "shapes", "batch_size": -2}]'], "rewards[0].batch_size must be at least 0, got -2"),
        (["--rewards", '[{"name": "clip", "weights": {"clip": .nan}}]'], "rewards[0].weights.clip must be finite, got"),
        (["--rewards", '[{"name": "shapes", "weights": {"TA": 0, "MQ": 0}}]'], "rewards: none of them counts"),
        (["--iterations", "4", "--evaluate.early", "[2, 9]"], "evaluate.early 9 is never reached: the run has 4"),
        (
            ["--iterations", "0", "--optimizer.lr", "-1"],  # all faults are told at once
            "iterations must be at least 1, got 0.\noptimizer.lr must be positive, got -1.0.",
        ),
        (["--rewards", '[{"name": "clip", "name": "ocr"}]'], "--rewards has the key 'name' twice"),
    ],
)
def test_the_parser_names_the_whole_key(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(TrainConfig, argv, prog="train")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("limit", "inside", "outside", "words"),
    [
        (Range(1), (1, 7), (0, math.inf, math.nan), "at least 1"),
        (Range(0, open_below=True), (1e-9, 3), (0, -1, math.inf), "positive"),
        (Range(0, 1, open_above=True), (0, 0.5), (1, -0.1), "in [0, 1)"),
        (Range(0, 1, open_below=True), (1, 0.5), (0, 1.1), "in (0, 1]"),
        (Range(most=3), (-5, 3), (3.1, -math.inf), "at most 3"),
        (Range(), (-5, 3), (math.nan, math.inf), "finite"),
        (Range(2, open_below=True), (2.1,), (2,), "greater than 2"),
        (get_args(Seconds)[1], (1e-9, 604_800), (0, 604_801), "in (0, 604800]"),
    ],
)
def test_ranges_and_their_words(limit: Range, inside: tuple, outside: tuple, words: str) -> None:
    assert all(limit.holds(value) for value in inside)
    assert not any(limit.holds(value) for value in outside)
    assert str(limit) == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nout: x\nseed: 2\n", "the key 'seed' twice (lines 1 and 3)"),
        ("optimizer:\n  lr: 1.0e-3\n  lr: 1.0e-4\n", "the key 'optimizer.lr' twice (lines 2 and 3)"),
        ("rewards:\n- name: clip\n  name: ocr\n", "the key 'rewards.name' twice"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    for argv in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(ConfigError) as error:
            parse(TrainConfig, argv, prog="train")
        assert message in str(error.value)
        assert str(file) in str(error.value)
