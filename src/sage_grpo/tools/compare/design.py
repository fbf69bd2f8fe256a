"""What an experiment is, as pure data: arms that differ in settings, seeds, a baseline, and what is read off the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sage_grpo.config.parsing import ConfigError
from sage_grpo.utils.suggest import did_you_mean

FIRST_SEED = 1000
"""Seeds of experiments start here: runs that were looked at while settings were chosen had small ones."""
Figure = Literal["curves", "steps", "bars"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One set of settings that is compared with others."""

    name: str
    """Short and unique; the first column of every table."""
    recipe: str
    """Where the settings start from, such as shapes/sage."""
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
    """What readers see; empty is the key."""
    higher: bool = True
    """Whether more is better."""
    ceiling: float | None = None
    """The best that can be reached, where that is known; scores are then also given as a share of the way from the base to it."""

    @property
    def title(self) -> str:
        """What readers see."""
        return self.label or self.key


@dataclass(frozen=True, kw_only=True)
class Suite:
    """An experiment: every arm is run with every seed."""

    name: str
    """A word, for files and the command line."""
    title: str
    """Heading of the report."""
    question: str
    """What it is to decide, in a sentence or two; stands under the heading."""
    arms: tuple[Arm, ...]
    """What is compared, in the order of the tables."""
    baseline: str
    """The arm that the others are compared with, seed by seed."""
    seeds: tuple[int, ...] = tuple(range(FIRST_SEED, FIRST_SEED + 8))
    """Seeds (`seed` of the configuration) of every arm."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all arms, before the arm's own."""
    iterations: int | None = None
    """Iterations of all arms; None is the recipe's."""
    points: tuple[int, ...] | None = None
    """Iterations that are evaluated; None goes by evaluate.every. The first (0) and the last always are. A sentinel that goes back goes to one of them: few
    points make that dearer than it is for a user."""
    passes: int | None = None
    """A budget of network passes: every run is evaluated after its last iteration within it, and compared there. None: where the cheapest
    arm ends, on the line between the evaluations before and after."""
    clips: int | None = None
    """A budget of scored clips, which is one of reward calls: every run is evaluated after its last iteration within it as well."""
    unseen: bool = False
    """At its end a run is also evaluated on the held-out prompts that no evaluation before had, for scores that its sentinel could not act on:
    columns `unseen/NAME`."""
    columns: tuple[Column, ...] = (Column(key="total", label="Overall"), Column(key="drift", higher=False))
    """What tables show; the first one decides."""
    kind: Literal["train", "rollout"] = "train"
    """train: train and evaluate. rollout: only sample `iterations` batches of rollouts, with exploration, and score them: nothing is
    learned, and the columns are means over these rollouts."""
    figures: tuple[Figure, ...] = ("curves",)
    """curves: columns over iterations and over network passes. steps: gradient norms by denoising step beside the predicted
    sensitivity. bars: the final value of every column, by arm."""
    notes: str = ""
    """Markdown that stands under the tables."""

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
