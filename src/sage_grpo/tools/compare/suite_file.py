"""Suites as YAML files: an experiment is data that `sage-grpo compare --suite FILE.yaml` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sage_grpo.config.parsing import ConfigError, read_yaml
from sage_grpo.tools.compare.design import FIRST_SEED, Suite, suite_from
from sage_grpo.utils.json_schema import misfit
from sage_grpo.utils.suggest import did_you_mean

Size = Literal["smoke", "brief", "full"]
"""smoke: two arms and seconds of two CPU cores, to see that it runs. brief: the arms that decide. full: all of the file."""
TINY = {
    "batch.prompts": 2,
    "batch.group_size": 2,
    "batch.micro_batch": 4,
    "evaluate.prompts": 2,
    "evaluate.steps": 2,
    "model.dtype": "float32",
}
"""Settings of the smoke size, after the suite's own."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Keys of a suite file besides the fields of a suite."""

    brief: list[str] | None = None
    """Arms of the brief size; None keeps all."""
    brief_iterations: int | None = None
    """Iterations of the brief size; None keeps the suite's."""
    smoke: list[str] | None = None
    """Arms of the smoke size; None keeps the baseline and the first other arm."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options that several arms share, by name: an arm's `groups: [NAME, ...]` adds them before its own options."""
    seconds: int | None = None
    """Estimated seconds of one H200 with 16 runs side by side, for the whole suite; a sentence in its notes."""


def load(file: Path, size: Size = "full") -> Suite:
    """The suite of a YAML file, whose name is the file's, at a size; ConfigError names the file and the key of a mistake."""
    if not file.is_file():
        raise FileNotFoundError(
            f"--suite {file}: there is no such file. A suite is a YAML file, such as research/suites/headline.yaml of the "
            "repository (docs/compare.md)."
        )
    content = read_yaml(file)
    extra = {one.name: content.pop(one.name) for one in fields(Extra) if one.name in content}
    fault = misfit(extra, Extra, "the file") or misfit(content.get("arms"), list[dict[str, Any]], "arms")
    if "name" in content:
        fault = "it has 'name', which is the file's: leave it out."
    try:
        _refuse(fault)
        more = Extra(**extra)
        content |= {"name": file.stem, "arms": [_with_groups(arm, more.groups) for arm in content["arms"]]}
        _refuse(misfit(content, Suite, "the suite"))
        return _sized(suite_from(content), more, size)
    except ConfigError as error:
        raise ConfigError(f"{file} is not a suite: {error}") from error


def _refuse(fault: str) -> None:
    if fault:
        raise ConfigError(fault)


def _with_groups(arm: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """An arm of the file with the options of its groups."""
    names, shared = arm.get("groups", []), dict[str, Any]()
    _refuse(misfit(names, list[str], "arms[].groups"))
    for name in names:
        if name not in groups:
            raise ConfigError(f"an arm is in the group {name!r}, and `groups` has none." + did_you_mean(name, groups))
        shared |= groups[name]
    own = {"options": {}, **arm}
    own.pop("groups", None)
    if isinstance(own["options"], dict):  # else it is refused by its type
        own["options"] = {**shared, **own["options"]}
    return own


def _sized(suite: Suite, extra: Extra, size: Size) -> Suite:
    """The arms, seeds and iterations of a size."""
    names = [arm.name for arm in suite.arms]
    first = [suite.baseline, *(name for name in names if name != suite.baseline)][:2]
    kept = {"full": names, "brief": extra.brief or names, "smoke": extra.smoke or first}
    for key, chosen in kept.items():
        for name in chosen:
            if name not in names:
                raise ConfigError(f"{key} names {name!r}, which is not one of its arms." + did_you_mean(name, names))
    arms = tuple(arm for arm in suite.arms if arm.name in kept[size])
    if size == "smoke":
        arms = tuple(replace(arm, iterations=None) for arm in arms)
        seeds = (FIRST_SEED, FIRST_SEED + 1)
        return replace(suite, arms=arms, seeds=seeds, iterations=2, points=(0, 2), options={**suite.options, **TINY})
    if size == "brief":
        iterations = extra.brief_iterations or suite.iterations
        points = None if suite.points is None else tuple(p for p in suite.points if p <= (iterations or p))
        return replace(suite, arms=arms, iterations=iterations, points=points)
    if extra.seconds is None:
        return suite
    price = f"Estimated at {extra.seconds} s of one H200 with 16 runs side by side."
    return replace(suite, notes="\n\n".join(note for note in (suite.notes, price) if note))
