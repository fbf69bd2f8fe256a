"""An experiment as pure data: arms that differ in settings, seeds, a baseline, and the columns of its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sage_grpo.config.parsing import ConfigError
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
    """The best possible score, where known; scores are then also given as a share of the gap from the base to it."""

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
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all arms, before the arm's own."""
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
    """The suite of plain data, as JSON and YAML have it, whose types were checked."""
    parts: dict[str, Any] = {**content, "arms": tuple(Arm(**arm) for arm in content["arms"])}
    if "columns" in content:
        parts["columns"] = tuple(Column(**column) for column in content["columns"])
    for name in ("seeds", "points", "figures"):
        if content.get(name) is not None:
            parts[name] = tuple(content[name])
    return Suite(**parts)
