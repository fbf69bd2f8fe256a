"""An experiment as pure data: arms that differ in settings, seeds, a baseline, and the columns of its tables; also as a YAML file, which
`sage-grpo compare --suite FILE.yaml` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sage_grpo.config.parsing import ConfigError, read_yaml
from sage_grpo.utils.json_schema import misfit
from sage_grpo.utils.suggest import did_you_mean

FIRST_SEED = 1000
"""Seeds of experiments start here: settings were chosen on runs with small seeds."""
Figure = Literal["curves", "steps", "bars"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One set of settings that is compared with others."""

    name: str
    """Short and unique; the first column of every table."""
    recipe: str
    """The recipe to start from, such as shapes/sage."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the recipe: dotted fields of TrainConfig ("optimizer.lr") with their values (numbers, strings, None,
    booleans, lists, mappings)."""
    iterations: int | None = None
    """Iterations of this arm; None is the suite's."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A metric of the held-out evaluation that tables and figures show."""

    key: str
    """Its name without "eval/": total, TA, MQ, VQ, drift, ..."""
    label: str = ""
    """For readers; empty is the key."""
    higher: bool = True
    """True where more is better."""
    ceiling: float | None = None
    """Score of perfect clips, where known, which is no bound; scores are then also given as a share of the gap from the base to it."""

    @property
    def title(self) -> str:
        return self.label or self.key


@dataclass(frozen=True, kw_only=True)
class Suite:
    """An experiment: every arm is run with every seed."""

    name: str
    """A word, for files and the command line."""
    title: str
    """Heading of the report."""
    question: str
    """The question that it decides, in a sentence or two, below the heading."""
    arms: tuple[Arm, ...]
    """The arms, in the order of the tables."""
    baseline: str
    """The arm that the others are compared with, seed by seed."""
    seeds: tuple[int, ...] = tuple(range(FIRST_SEED, FIRST_SEED + 8))
    """Seeds (`seed` of the configuration) of every arm."""
    config: str | None = None
    """A settings file of all arms, as `sage-grpo train --config` takes it: the arm's recipe stands in place of the file's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all arms, after those of `config` and before the arm's own."""
    iterations: int | None = None
    """Iterations of all arms; None is the recipe's."""
    points: tuple[int, ...] | None = None
    """Iterations that are evaluated; None goes by evaluate.every. The first (0) and the last always are. A sentinel that rolls back returns to one of them: few
    points cost it more than they cost a user."""
    passes: int | None = None
    """A budget of network evaluations: every run is evaluated after its last iteration within it, and compared there. None: the end of the
    cheapest arm, interpolated between the evaluations before and after."""
    clips: int | None = None
    """A budget of scored clips (reward calls): every run is evaluated after its last iteration within it as well."""
    unseen: bool = False
    """At its end a run is also evaluated on held-out prompts that no earlier evaluation had, for scores that the sentinel could not act on:
    columns `unseen/NAME`."""
    columns: tuple[Column, ...] = (Column(key="total", label="Overall"), Column(key="drift", higher=False))
    """Columns of the tables; the first one decides."""
    kind: Literal["train", "rollout"] = "train"
    """train: train and evaluate. rollout: only sample `iterations` batches of rollouts, with exploration, and score them, without learning;
    the columns are means over these rollouts."""
    figures: tuple[Figure, ...] = ("curves",)
    """curves: columns over iterations and over network evaluations. steps: gradient norms by denoising step beside the predicted
    sensitivity. bars: the final value of every column, by arm."""
    notes: str = ""
    """Markdown below the tables."""

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(arm.name for arm in self.arms).items() if count > 1]
        if twice:
            raise ConfigError(f"Suite {self.name}: two arms are called {twice[0]!r}.")
        if not self.arms or not self.seeds or not self.columns:
            raise ConfigError(f"Suite {self.name} needs at least one arm, one seed and one column.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"Suite {self.name}: a seed is there twice in {list(self.seeds)}.")
        names = [arm.name for arm in self.arms]
        if self.baseline not in names:
            raise ConfigError(
                f"Suite {self.name}: the baseline {self.baseline!r} is none of its arms ({', '.join(names)})."
                + did_you_mean(self.baseline, names)
            )


def suite_from(content: Mapping[str, Any]) -> Suite:
    parts: dict[str, Any] = {**content, "arms": tuple(Arm(**arm) for arm in content["arms"])}
    if "columns" in content:
        parts["columns"] = tuple(Column(**column) for column in content["columns"])
    for name in ("seeds", "points", "figures"):
        if content.get(name) is not None:
            parts[name] = tuple(content[name])
    return Suite(**parts)


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
