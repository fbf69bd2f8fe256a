"""Views of committed data as Markdown, by the names that marked places use (see pages.py). Each is a function of a file or folder."""

from __future__ import annotations

import contextlib
import io
import json
import math
import operator
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from sage_grpo.cli.main import main
from sage_grpo.utils.text import fixed, markdown


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown(heads, rows))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def same_bits(file: Path) -> str:
    """Repeated runs of one seed: how many differ from the first of their kind."""
    rows = [
        [
            f"`{row['recipe']}`",
            "yes" if row["deterministic"] else "no",
            fixed(row["seconds"], 2),
            f"{sum(number is not None for number in row['part_after'])} of {len(row['part_after'])}",
        ]
        for row in json.loads(file.read_text())["training"]
    ]
    return _table(["recipe", "`model.deterministic`", "seconds an iteration", "runs that differ from the first"], rows)


def demo_runs(file: Path) -> str:
    """Scores and seconds of demo runs."""
    cells = [
        [
            f"`{row['recipe']}`",
            str(row["iterations"]),
            *(fixed(row[when][key], 3) for key in ("total", "drift") for when in ("before", "after")),
            str(row["seconds"]),
        ]
        for row in read(file)
    ]
    return _table(["recipe", "iterations", "score before", "after", "drift before", "after", "seconds"], cells)


def number(file: Path, key: str, over: str = "", digits: str = "3", times: str = "1") -> str:
    """A number of a JSON file by its dotted key, divided by another where `over` names one."""
    found = json.loads(file.read_text())
    return fixed(float(times) * _at(found, key) / (_at(found, over) if over else 1.0), int(digits))


def _at(found: Any, path: str) -> float:
    """A number in it by its dotted key; a place in a list by its number."""
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return float(found)


def ceilings(file: Path) -> str:
    """Scores of clean clips after the VAE."""
    found = json.loads(file.read_text())["after_vae"]
    cells = [fixed(found[name], 3 if name == "Overall" else 4) for name in ("Overall", "drift", "flicker")]
    return _table(["Overall", "drift", "flicker"], [cells])


def row(file: Path, key: str, digits: str = "3", times: str = "1", **match: str) -> str:
    """A number, by its dotted key, of the last line of a JSON-lines file whose fields have these values."""
    found = [line for line in read(file) if all(str(line.get(name)) == value for name, value in match.items())]
    if not found:
        raise ValueError(f"{file.name} has no line with {match}.")
    return fixed(float(times) * _at(found[-1], key), int(digits))


def probe(file: Path) -> str:
    """A probe.json of `sage-grpo probe`: what exploring at each step, at all, and at the best one with other etas did; 95% intervals over prompts."""
    found = json.loads(file.read_text())
    rows = [(f"step {one['step']}", one) for one in found["steps"]] + [("all steps", found["all_steps"])]
    others = [one for one in found["etas"] if one["eta"] != found["kernel"]["eta"]]
    rows += [(f"step {found['eta_step']}, eta {one['eta']:g}", one) for one in others]

    heads = ["exploring at", "start", "explored", "R", "std in a branch", "reward", "drift"]
    cells = [
        [
            name,
            fixed(one["start"]["value"], 2),
            _with_interval(one["explored"], 2),
            _with_interval(one["linear"], 2),
            fixed(one["std"]["value"], 2),
            _with_interval(one["reward"], 2, signed=True),
            _with_interval(one["drift"], 3, signed=True),
        ]
        for name, one in rows
    ]
    return _table(heads, cells)


def _with_interval(one: dict[str, float], digits: int, *, signed: bool = False) -> str:
    mean, low, high = (fixed(one[key], digits, signed=signed) for key in ("value", "low", "high"))
    return f"{mean} ({low} to {high})"


def plan_vs_measured(file: Path) -> str:
    """research/benchmarks/plan_vs_measured.py: seconds and peaks of whole iterations, predicted and measured."""
    cells = []
    for case, found in json.loads(file.read_text())["cases"].items():
        seconds, gib = found["iteration"]["seconds"], found["iteration"]["gib"]
        figures = [f"{fixed(a, 1)} s, {fixed(b, 1)} GiB" for a, b in zip(seconds, gib, strict=True)]
        off = [fixed(100 * (pair[0] / pair[1] - 1), 0, signed=True) for pair in (seconds, gib)]
        cells.append([case, *figures, f"{off[0]}%, {off[1]}%"])
    return _table(["case, frames, method", "predicted", "measured", "off by"], cells)


def whole_iterations(file: Path, phase: str) -> str:
    """Whole iterations: seconds and peaks of a phase, measured and planned; without rows of a removed option."""
    cells = [
        [found["case"], *(fixed(value, 1) for key in ("seconds", "gib") for value in found["phases"][phase][key])]
        for found in read(file)
        if "rollout.cheap" not in found["options"]
    ]
    return _table(["case", "seconds", "plan", "GiB", "plan"], cells)


def under_limits(file: Path) -> str:
    """Whole iterations under a memory limit: what a process may have, its peak, and the planned one."""
    cells = [
        [found["case"], *(fixed(value, 1) for value in (found["limit_gib"], *found["phases"]["iteration"]["gib"]))]
        for found in read(file)
    ]
    return _table(["case", "GiB at most", "peak", "plan"], cells)


def memory_by_gpus(file: Path) -> str:
    """The table of research/benchmarks/scale_table.py: all of it is a formula."""
    from scale_table import table

    return table()


def loaded(folder: Path) -> tuple[Any, list[dict[str, Any]], str]:
    """A comparison: what was asked for, the rows that count, and the command."""
    from sage_grpo.tools.compare import store

    suite, keys, command = store.load_suite(folder)
    return suite, list(store.latest(store.read_rows(folder / store.ROWS), keys).values()), command


@cache
def summary_of(folder: Path) -> Any:
    """Its numbers."""
    from sage_grpo.tools.compare.summary import summarize

    suite, rows, _ = loaded(folder)
    return summarize(suite, rows)


def arms(folder: Path, show: str, names: str = "") -> str:
    """Arms of a comparison (all, or those between semicolons) by the quantities in `show`: a column's key (its value at the end), minus, equal,
    equal_minus, clips and clips_minus (at the end, at equal network evaluations and at equal clips; of another column than the first as minus:KEY),
    way, passes."""
    summary = summary_of(folder)
    wanted, kinds = [name for name in names.split(";") if name] or list(summary.arms), _words(show)
    base = {kind: _base(summary.arms[wanted[0]], kind) for kind in kinds}
    rows = [["base", *base.values()]] if any(base.values()) else []
    rows += [[name, *(_shown(summary, name, kind) for kind in kinds)] for name in wanted]
    return _table(["arm", *(_head(summary, kind) for kind in kinds)], rows)


def _base(arm: Any, kind: str) -> str:
    from sage_grpo.utils.text import number as plain

    return plain(arm.base[kind]) if kind in arm.base else ""


def _shown(summary: Any, name: str, kind: str) -> str:
    from sage_grpo.tools.compare.report import percent, plus_minus

    what, _, key = kind.partition(":")
    found = summary.arms[name]
    if what == "passes":
        return fixed(found.passes, 0, grouped=True)
    if what == "way":
        return str(percent(found.way))
    if what not in BUDGETED:
        return str(plus_minus(found.final[what]))
    signed = what.endswith("minus")
    if signed and name == summary.suite.baseline:
        return ""
    number = getattr(found, BUDGETED[what]).get(key or summary.suite.columns[0].key)
    return _difference(number) if signed else str(plus_minus(number))


BUDGETED = {
    "minus": "difference",
    "equal": "equal",
    "equal_minus": "equal_difference",
    "clips": "clips",
    "clips_minus": "clips_difference",
}


def _head(summary: Any, kind: str) -> str:
    what, _, key = kind.partition(":")
    titles = {column.key: column.title for column in summary.suite.columns}
    title = titles[key] if key else summary.suite.columns[0].title
    heads = {
        "minus": f"minus {summary.suite.baseline}" + (f", {titles[key]}" if key else ""),
        "equal": f"{title} at {summary.budget:,.0f} evaluations",
        "equal_minus": f"minus {summary.suite.baseline} at equal cost",
        "clips": f"{title} at {summary.suite.clips or 0:,} clips",
        "clips_minus": f"minus {summary.suite.baseline} at equal clips",
        "way": "share of the gap closed",
        "passes": "network evaluations",
    }
    return heads.get(what) or titles[what]


FIGURE = re.compile(r"\{(\w+) (\S+)([^{}]*)\}")
"""A figure in answers.yaml: {VIEW SUITE words}, SUITE a folder of research/results or a path from the repository's root."""


def answers(file: Path, part: str) -> str:
    """A part of answers.yaml with its figures: a list as bullets, heads and rows as a table, and suites as the table of all comparisons."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))[part]
    if isinstance(content, list):
        return "\n".join(f"- {_filled(file.parent, text)}" for text in content)
    if part == "suites":
        rows = [_suite_row(file.parent, name, *words) for name, words in content.items()]
        return _table(["rows", "question", "answer", "seeds"], rows)
    return _table(content["heads"], [[_filled(file.parent, str(cell)) for cell in row] for row in content["rows"]])


def _filled(results: Path, text: str) -> str:
    def figure(match: re.Match[str]) -> str:
        place = results / match[2] if "/" not in match[2] else results.parents[1] / match[2]
        words = [word.split("=", 1) if re.match(r"[a-z_]+=", word) else word for word in shlex.split(match[3])]
        named = dict(word for word in words if isinstance(word, list))
        return VIEWS[match[1]](place, *(word for word in words if isinstance(word, str)), **named)

    return FIGURE.sub(figure, " ".join(text.split()))


def _suite_row(results: Path, name: str, question: str, answer: str) -> list[str]:
    counts = {arm.counts["done"] for arm in summary_of(results / name).arms.values()} - {0}
    seeds = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(*counts)
    return [f"[{name}]({name}/runs.jsonl)", question, _filled(results, answer), seeds]


def published(file: Path, suite: str) -> str:
    """The paper's rows of a setting beside ours. Overall is VQ + MQ + TA in both, as the paper has it, over seeds."""
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.statistics import mean_interval

    def cell(arm: str | None) -> str:
        runs = _runs(file.parent / suite, arm or "")
        found = [row["evaluations"][str(row["iterations"])] for row in runs]
        return (
            plus_minus(mean_interval([sum(one[part] for part in ("VQ", "MQ", "TA")) for one in found]))
            if runs
            else "not run"
        )

    cells = []
    base = next(iter(summary_of(file.parent / suite).arms.values())).base
    for method, kind, arm, theirs in json.loads(file.read_text(encoding="utf-8"))[suite]:
        paper = [fixed(sum(theirs), 2), ", ".join(fixed(one, 2) for one in theirs)] if theirs else ["", ""]
        ours = fixed(base["VQ"] + base["MQ"] + base["TA"], 3) if method == "base" else cell(arm)
        cells.append([method, kind, *paper, ours])
    return _table(["method", "KL", "paper: Overall", "paper: VQ, MQ, TA", "ours: Overall"], cells)


def largest(folder: Path, metric: str) -> str:
    """The largest value that a training metric has in any row."""
    found = [value for row in loaded(folder)[1] for value in row["training"].get(metric, []) if value is not None]
    return f"`{max(found):.0e}`"


def pace(folder: Path, arm: str, over: str) -> str:
    """Seconds of an iteration over those of another arm."""
    return fixed(
        operator.truediv(
            *(statistics.fmean(row["seconds"]["iteration"] for row in _runs(folder, name)) for name in (arm, over))
        ),
        1,
    )


def between(folder: Path, arm: str, other: str, column: str = "Overall") -> str:
    """Difference of an arm's end from another's, seed by seed, and prompt by prompt where the rows have those."""
    from sage_grpo.tools.compare.summary import cells, difference, end

    ours, theirs = (cells({row["seed"]: row for row in _runs(folder, name)}, column, end) for name in (arm, other))
    return _difference(difference(ours, theirs))


def _difference(found: Any) -> str:
    """An interval of a difference, which is remembered for `pages.notes_on`."""
    from sage_grpo.tools.compare.report import plus_minus

    text = str(plus_minus(found, signed=True))
    if found is not None:
        TESTED[found.mean, found.half] = text, found.p
    return text


TESTED: dict[tuple[float, float], tuple[str, float]] = {}
"""Differences that were shown since this was emptied: their text and their p."""


def corrected() -> tuple[int, int, list[str]]:
    """The number of tested differences, that of intervals without zero, and the texts of those among them that Holm's correction leaves undecided."""
    from sage_grpo.utils.statistics import LEVEL, holm

    tests = {str(number): (text, p) for number, (text, p) in enumerate(TESTED.values()) if not math.isnan(p)}
    adjusted = holm({name: p for name, (_, p) in tests.items()})
    apart = [name for name, (_, p) in tests.items() if p < 1 - LEVEL]
    return len(tests), len(apart), [tests[name][0] for name in apart if adjusted[name] >= 1 - LEVEL]


def value(folder: Path, arm: str, column: str = "", kind: str = "final") -> str:
    """One number of a comparison. kind: final, difference (from the baseline), way, equal (at equal passes), equal_difference, clips (at equal
    clips), clips_difference, base."""
    from sage_grpo.tools.compare.report import percent as share
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.text import number as plain

    summary = summary_of(folder)
    found, key = summary.arms[arm], column or summary.suite.columns[0].key
    if kind == "base":
        return plain(found.base[key])
    if kind == "way":
        return share(found.way)
    number = getattr(found, kind).get(key)
    return _difference(number) if kind.endswith("difference") else plus_minus(number)


def budgets(folder: Path) -> str:
    """A comparison on its three axes: the end, the budget of clips and that of passes, each with the difference from the baseline."""
    from sage_grpo.tools.compare.report import plus_minus

    summary = summary_of(folder)
    first = summary.suite.columns[0].key
    heads = ["method", "passes", "at its end", "at equal clips", "minus branch", "at equal passes", "minus branch"]
    rows = [
        [
            arm.name,
            f"{arm.passes:,.0f}",
            plus_minus(arm.final[first]),
            plus_minus(arm.clips[first]),
            _difference(arm.clips_difference.get(first)) if arm.clips_difference else "",
            plus_minus(arm.equal[first]),
            _difference(arm.equal_difference.get(first)) if arm.equal_difference else "",
        ]
        for arm in summary.arms.values()
    ]
    return _table([head.replace("branch", summary.suite.baseline) for head in heads], rows)


def at_equal(folder: Path, column: str, values: str, arms: str) -> str:
    """The first column where another one first reached these values, on the line between evaluations: means over the seeds that got there, and paired
    differences from the first of these arms."""
    titles = {known.key: known.title for known in summary_of(folder).suite.columns}
    first, other = next(iter(titles.values())), titles.get(column, column)
    names, wanted = [name for name in summary_of(folder).arms if name.startswith(arms)], _words(values)
    rows = []
    for name in names:
        cells = [name]
        for value in wanted:
            found = _reached(folder, name, column, float(value))
            short = "" if len(found) == len(_runs(folder, name)) else f" ({len(found)} seed{'s' * (len(found) != 1)})"
            cells.append(f"{fixed(statistics.fmean(found.values()), 3)}{short}" if found else "not reached")
            cells.append(_minus(found, _reached(folder, names[0], column, float(value))) if name != names[0] else "")
        rows.append(cells)
    heads = [head for value in wanted for head in (f"{first} at {other} {value}", f"minus {names[0]}")]
    return _table(["arm", *heads], rows)


def gap_at_equal(folder: Path, column: str, value: str, arm: str, other: str) -> str:
    """One of these differences."""
    return _minus(*(_reached(folder, name, column, float(value)) for name in (arm, other)))


def _minus(ours: dict[int, float], theirs: dict[int, float]) -> str:
    from sage_grpo.utils.statistics import paired_interval

    return _difference(paired_interval(ours, theirs)) if len(ours.keys() & theirs.keys()) > 1 else ""


def _reached(folder: Path, arm: str, column: str, value: float) -> dict[int, float]:
    key = summary_of(folder).suite.columns[0].key
    found = {row["seed"]: _where_reached(row, column, value, key) for row in _runs(folder, arm)}
    return {seed: there for seed, there in found.items() if there is not None}


def _where_reached(row: dict[str, Any], column: str, value: float, key: str) -> float | None:
    points = [scores for _, scores in sorted(row["evaluations"].items(), key=lambda one: int(one[0]))]
    for before, after in pairwise(points):
        if before[column] <= value <= after[column]:
            share = (value - before[column]) / (after[column] - before[column])
            return float(before[key] + share * (after[key] - before[key]))
    return None


def seeds_beyond(folder: Path, arm: str, column: str = "Overall", share: str = "", below_base: str = "") -> str:
    """In how many seeds a run ended beyond a share of the gap closed, or (below_base=yes) below where it began."""
    key = next(one for one in summary_of(folder).suite.columns if one.key == column)
    found = []
    for row in _runs(folder, arm):
        base, last = row["evaluations"]["0"][column], row["evaluations"][str(row["iterations"])][column]
        found.append(last < base if below_base else last >= base + float(share) * (key.ceiling - base))
    return f"{sum(found)} of {len(found)}"


def acted(folder: Path, arm: str) -> str:
    """In how many runs the sentinel did more than warn."""
    runs = _runs(folder, arm)
    return f"{sum(any(action != 'warn' for _, _, action in row['sentinel']) for row in runs)} of {len(runs)}"


def ahead_of(folder: Path, arm: str, other: str, column: str = "Overall") -> str:
    """In how many seeds an arm ends above another."""
    last = [_ends(folder, name, column) for name in (arm, other)]
    both = last[0].keys() & last[1].keys()
    return f"{sum(last[0][seed] > last[1][seed] for seed in both)} of {len(both)}"


def made_again(folder: Path, again: str) -> str:
    """Number of repeated runs in a file that have every digit that is kept of those of a comparison: scores, training and steps."""
    first = {row["key"]: row for row in loaded(folder)[1]}
    same = [
        all(row[part] == first[row["key"]][part] for part in ("evaluations", "training", "steps", "passes"))
        for row in read(Path(__file__).parents[2] / again)
    ]
    return f"{sum(same)} of {len(same)}"


def _ends(folder: Path, arm: str, column: str) -> dict[int, float]:
    return {row["seed"]: row["evaluations"][str(row["iterations"])][column] for row in _runs(folder, arm)}


def _runs(folder: Path, arm: str) -> list[dict[str, Any]]:
    """The finished rows of an arm, by seed."""
    from sage_grpo.tools.compare.summary import reached

    return sorted((row for row in loaded(folder)[1] if row["arm"] == arm and reached(row)), key=lambda row: row["seed"])


def steps(folder: Path, arms: str) -> str:
    """Gradient norms by step beside what the kernel predicts, both over their mean; arms are separated by semicolons."""
    summary = summary_of(folder)
    rows = []
    for name in arms.split(";"):
        known = {step: found for step, found in summary.arms[name].steps.items() if "raw" in found}
        norms = statistics.fmean(found["raw"] for found in known.values())
        predicted = statistics.fmean(found["sensitivity"] for found in known.values())
        inverse = statistics.fmean(1 / found["std"] for found in known.values())
        for step, found in known.items():
            shares = (found["raw"] / norms, found["sensitivity"] / predicted, 1 / found["std"] / inverse)
            rows.append([name, str(step), *(fixed(share, 2) for share in (*shares, found["equalized"] / norms))])
    return _table(["arm", "step", "gradient", "abs(b) / std", "1 / std", "gradient as weighted"], rows)


# ---- side by side


def where_value(file: Path, seed: str, pattern: str, column: str, digits: str = "3") -> str:
    """One cell of it."""
    row = next(row for row in read(file) if row["seed"] == int(seed) and row["pattern"] == pattern)
    return fixed(row[column], int(digits))


@cache
def planned(file: Path, command: str, gpu: str) -> str:
    """Duration of a guide's command by `sage-grpo plan`: its one command that ends so, with the guide's own configuration."""
    text = file.read_text()
    commands = re.findall(r"^sage-grpo (?:train|plan) (.+)$", re.sub(r"\\\n *", "", text), re.MULTILINE)
    (words,) = [one for one in commands if one.endswith(command)]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for name, content in re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            Path(name).write_text(content)
        main(["plan", *shlex.split(words), "--gpu", gpu, "--json"])
    hours = json.loads(printed.getvalue())["gpu_hours"]
    return f"{fixed(hours, 0)} hours" if hours > 1.5 else f"{fixed(60 * hours, 0)} minutes"


VIEWS: dict[str, Callable[..., str]] = {
    name: function
    for name, function in vars().items()
    if callable(function) and function.__module__ == __name__ and not name.startswith("_")
}
"""By name; all of them give Markdown but `read`, `loaded`, `summary_of` and `corrected`, which serve the others."""
