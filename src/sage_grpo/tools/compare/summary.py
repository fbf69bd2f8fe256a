"""The numbers of an experiment from its rows: means over seeds, differences seed by seed, shares of the gap closed, equal cost."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sage_grpo.tools.compare.design import Column, Suite
from sage_grpo.utils.statistics import Interval, crossed_interval, holm, mean_interval, paired_interval

Row = Mapping[str, Any]
Runs = Mapping[int, Row]
"""Rows of an arm by seed."""


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """An arm over its seeds."""

    name: str
    iterations: int
    counts: dict[str, int]
    base: dict[str, float]
    base_range: dict[str, tuple[float, float]]
    """The lowest and the highest of its runs: the same model may score a little differently in another process."""
    final: dict[str, Interval]
    """Columns after the last iteration, over the seeds that got there."""
    way: Interval | None
    equal: dict[str, Interval]
    """Columns at equal network evaluations: within the suite's budget, or at the end of the cheapest arm."""
    clips: dict[str, Interval]
    """Columns within the suite's budget of scored clips; empty where it has none."""
    difference: dict[str, Interval]
    equal_difference: dict[str, Interval]
    clips_difference: dict[str, Interval]
    passes: float
    """Network evaluations of a whole run, mean over seeds."""
    updates: float
    seconds: dict[str, float]
    """Means over runs: an iteration, all evaluations, the run."""
    curves: dict[str, dict[int, Interval]] = field(repr=False)
    passes_at: dict[int, float] = field(repr=False)
    steps: dict[int, dict[str, float]] = field(repr=False)
    """Gradient norms and predictions by denoising step, means over runs."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An experiment."""

    suite: Suite
    arms: dict[str, ArmSummary]
    budget: float
    """Network evaluations of the comparison at equal cost; NaN where there is none."""
    adjusted: dict[str, float]
    """p of every arm's difference in the first column after Holm's adjustment over all arms."""


def summarize(suite: Suite, rows: Sequence[Row]) -> Summary:
    """Summarize the valid rows, one per arm and seed at most (see `store.latest`)."""
    by_arm = {arm.name: {row["seed"]: row for row in rows if row["arm"] == arm.name} for arm in suite.arms}
    ended = {name: {s: row for s, row in runs.items() if reached(row)} for name, runs in by_arm.items()}
    costs = [_mean(map(cost, runs.values())) for runs in ended.values() if runs]
    budget = min(costs) if costs and suite.kind == "train" and min(costs) > 0 else math.nan
    if costs and suite.passes is None and math.isclose(min(costs), max(costs)):
        budget = math.nan  # all cost the same: their ends are compared
    budget = budget if suite.passes is None or math.isnan(budget) else suite.passes
    baseline = ended[suite.baseline]
    arms = {name: _arm(suite, name, by_arm[name], ended[name], baseline, budget) for name in by_arm}
    first = suite.columns[0].key
    tests = {name: arm.difference[first].p for name, arm in arms.items() if first in arm.difference}
    return Summary(suite=suite, arms=arms, budget=budget, adjusted=holm(tests))


def reached(row: Row) -> bool:
    return row["status"] == "done" and str(row["iterations"]) in row["evaluations"]


def cost(row: Row) -> float:
    """Network evaluations of a whole run."""
    return row["passes"][str(row["iterations"])]


def _arm(suite: Suite, name: str, runs: Runs, ended: Runs, baseline: Runs, budget: float) -> ArmSummary:
    keys = [column.key for column in suite.columns]
    rows = list(ended.values())

    def columns(at: Callable[[Runs, str], dict[int, Cell]]) -> tuple[dict[str, Interval], dict[str, Interval]]:
        own = {key: at(ended, key) for key in keys}
        others = {} if name == suite.baseline else {key: at(baseline, key) for key in keys}
        return (
            {key: interval(cells) for key, cells in own.items()},
            {key: difference(own[key], cells) for key, cells in others.items()},
        )

    final, gaps = columns(lambda runs, key: cells(runs, key, end))
    equal, equal_gaps = (
        ({}, {}) if math.isnan(budget) else columns(lambda runs, key: _at_budget(suite, runs, key, budget))
    )
    clips, clips_gaps = (
        ({}, {}) if suite.clips is None else columns(lambda runs, key: cells(runs, key, within("clips")))
    )
    points = sorted({int(point) for row in rows for point in row["evaluations"]})
    bases = {key: known for key in keys if (known := _at(rows, key, 0))}
    states = [runs[seed]["status"] if seed in runs else "missing" for seed in suite.seeds]
    return ArmSummary(
        name=name,
        iterations=max((row["iterations"] for row in runs.values()), default=0),
        counts={state: states.count(state) for state in ("done", "diverged", "failed", "missing")},
        base={key: _mean(known) for key, known in bases.items()},
        base_range={key: (min(known), max(known)) for key, known in bases.items()},
        final=final,
        way=_way(suite.columns[0], rows),
        equal=equal,
        clips=clips,
        difference={key: gap for key, gap in gaps.items() if gap.count},
        equal_difference=equal_gaps,
        clips_difference=clips_gaps,
        passes=_mean(map(cost, rows)),
        updates=_mean(row["updates"] for row in rows),
        seconds={part: _mean(row["seconds"][part] for row in rows) for part in ("iteration", "evaluate", "total")},
        curves={key: {p: mean_interval(_at(rows, key, p)) for p in points if _at(rows, key, p)} for key in keys},
        passes_at={p: _mean(row["passes"][str(p)] for row in rows if str(p) in row["passes"]) for p in points},
        steps=_steps(rows),
    )


@dataclass(frozen=True)
class Cell:
    """A column of one run at one evaluation."""

    mean: float
    by_prompt: tuple[float | None, ...] = ()
    """Its value for every prompt, where the row has it."""


Cells = Mapping[int, Cell]


def cells(runs: Runs, key: str, point: Callable[[Row], str | None]) -> dict[int, Cell]:
    found = {}
    for seed, row in runs.items():
        at = point(row)
        value = None if at is None else row["evaluations"].get(at, {}).get(key)
        if value is not None:
            found[seed] = Cell(value, tuple(row.get("by_prompt", {}).get(at, {}).get(key, ())))
    return found


def end(row: Row) -> str:
    return str(row["iterations"])


def within(name: str) -> Callable[[Row], str | None]:

    def point(row: Row) -> str | None:
        at = row.get("budgets", {}).get(name)
        return None if at is None else str(at)

    return point


def _at_budget(suite: Suite, runs: Runs, key: str, budget: float) -> dict[int, Cell]:
    """A column of every seed at a budget: measured there where the suite has one, else interpolated."""
    if suite.passes is not None:
        return cells(runs, key, within("passes"))
    values = {seed: at_passes(row, key, budget) for seed, row in runs.items()}
    return {seed: Cell(value) for seed, value in values.items() if value is not None}


def interval(scores: Cells) -> Interval:
    """Over seeds and prompts where all rows have scores by prompt, else over seeds."""
    found = crossed_interval(_table([cell.by_prompt for cell in scores.values()]))
    return found if found.count else mean_interval([cell.mean for cell in scores.values()])


def difference(ours: Cells, theirs: Cells) -> Interval:
    """Ours minus theirs over the seeds that both have; prompt by prompt where both have those."""
    seeds = sorted(set(ours) & set(theirs))
    tables = [_table([cells[seed].by_prompt for seed in seeds]) for cells in (ours, theirs)]
    if all(tables) and len(tables[0][0]) == len(tables[1][0]):
        return crossed_interval([[a - b for a, b in zip(*rows)] for rows in zip(*tables)])
    return paired_interval({seed: ours[seed].mean for seed in seeds}, {seed: theirs[seed].mean for seed in seeds})


def _table(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Seeds by prompts; empty where a seed has no scores by prompt, a clip has none, or the prompts differ."""
    table = [[value for value in row if value is not None] for row in rows]
    lengths = {len(row) for row in (*rows, *table)}
    return table if len(lengths) == 1 and lengths != {0} else []


def _at(rows: Sequence[Row], key: str, point: int) -> list[float]:
    values = [row["evaluations"].get(str(point), {}).get(key) for row in rows]
    return [value for value in values if value is not None]


def _way(column: Column, rows: Sequence[Row]) -> Interval | None:
    """The share of the gap, from each run's own base."""
    if column.ceiling is None:
        return None
    shares = []
    for row in rows:
        base, last = (row["evaluations"].get(point, {}).get(column.key) for point in ("0", end(row)))
        if base is not None and last is not None and base != column.ceiling:
            shares.append((last - base) / (column.ceiling - base))
    return mean_interval(shares) if shares else None


def at_passes(row: Row, key: str, budget: float) -> float | None:
    """A column at a number of network evaluations, interpolated between two evaluations; None past its end."""
    found = [
        (row["passes"][point], scores[key])
        for point, scores in sorted(row["evaluations"].items(), key=lambda one: int(one[0]))
        if scores.get(key) is not None
    ]
    for (low, before), (high, after) in pairwise(found):
        if low <= budget <= high:
            return before + (after - before) * (budget - low) / (high - low) if high > low else before
    return found[-1][1] if found and math.isclose(found[-1][0], budget, rel_tol=1e-9) else None


def _steps(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for step, values in row.get("steps", {}).items():
            for name, value in values.items():
                if value is not None:
                    found[int(step)][name].append(value)
    return {step: {name: _mean(values) for name, values in kinds.items()} for step, kinds in sorted(found.items())}


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else math.nan
