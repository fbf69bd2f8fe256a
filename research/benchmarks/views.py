"""Views of committed data as Markdown, by the names that marked places use (see pages.py). Each is a function of a file or folder."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    """Repeated runs of one seed: how many part from the first of their kind."""
    rows = [
        [
            f"`{row['recipe']}`",
            "yes" if row["deterministic"] else "no",
            fixed(row["seconds"], 2),
            f"{sum(number is not None for number in row['part_after'])} of {len(row['part_after'])}",
        ]
        for row in json.loads(file.read_text())["training"]
    ]
    return _table(["recipe", "`model.deterministic`", "seconds an iteration", "runs that part from the first"], rows)


def demo_run(file: Path, recipe: str) -> str:
    """A demo run in a sentence."""
    row = next(row for row in read(file) if row["recipe"] == recipe)
    gain = fixed(row["after"]["total"] - row["before"]["total"], 3, signed=True)
    return f"{fixed(row['after']['total'], 3)} ({gain}), drift {fixed(row['after']['drift'], 3)}, {row['seconds']} s"


def number(file: Path, key: str, over: str = "", digits: str = "3", times: str = "1") -> str:
    """A number of a JSON file by its dotted key, divided by another where `over` names one."""
    found = json.loads(file.read_text())
    return fixed(float(times) * _at(found, key) / (_at(found, over) if over else 1.0), int(digits))


def _at(found: Any, path: str) -> float:
    """A number in it by its dotted key; a place in a list by its number."""
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return float(found)


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


def ways(file: Path) -> str:
    """Passes per clip and how alike each way around the branch ranks clips; 95% intervals over prompts."""
    found = json.loads(file.read_text())
    cells = []
    for one in [found["full"], *found["ways"]]:
        way, alike, reward = one["way"], one.get("correlation"), one.get("reward")
        cells.append(
            [
                str(way.get("before_steps", 0)),
                str(way["after_steps"]),
                way["solver"],
                ", ".join(f"{name} {value}" for name, value in way["cheap"].items()),
                fixed(one["passes_per_clip"], 1),
                "the full way" if alike is None else _with_interval(alike, 2),
                "" if reward is None else _with_interval(reward, 3, signed=True),
            ]
        )
    return _table(["steps before", "after", "solver", "cheap", "passes a clip", "rank correlation", "reward"], cells)


def _with_interval(one: dict[str, float], digits: int, *, signed: bool = False) -> str:
    mean, low, high = (fixed(one[key], digits, signed=signed) for key in ("value", "low", "high"))
    return f"{mean} ({low} to {high})"


def fsdp(file: Path) -> str:
    """Errors and memory of FSDP on one GPU against none."""
    cells = []
    for found in json.loads(file.read_text())["cases"]:
        case = found["case"]
        kept = "yes" if case["checkpointing"] else "no"
        errors = (found["relative_loss_error"], found["relative_gradient_error"])
        cells.append(
            [
                "LoRA" if case["lora"] else "all weights",
                "float32" if case["float32"] else "bfloat16",
                kept + (", `cpu_offload`" if case["cpu_offload"] else ""),
                *("0" if error == 0 else f"{error:.1e}" for error in errors),
                *(fixed(found[kind]["gib_peak"], 1) for kind in ("plain", "fsdp")),
            ]
        )
    heads = ["trained", "compute", "gradient checkpointing", "loss error", "gradient error", "GiB plain", "GiB FSDP"]
    return _table(heads, cells)


def full_size(file: Path) -> str:
    """Seconds and peaks of passes of HunyuanVideo-1.5, and the formula's memory."""
    found = json.loads(file.read_text())
    lora, full = found["backward_lora"], found["backward_full"]
    rows = [
        ("forward pass, one branch: diffusers' own", found["forward"]["stock"], None),
        ("forward pass: packed (ours)", found["forward"]["packed"], None),
        ("forward pass: packed, compiled", found["forward"]["compiled"], None),
        ("backward pass of a LoRA of rank 32, two branches: plain", lora["plain"], lora["formula_gib"]),
        ("the same: FSDP", lora["fsdp"], None),
        ("backward pass of all weights, without optimizer and anchor: plain", full["plain"], full["formula_gib"]),
        ("the same: FSDP", full["fsdp"], None),
        ("decoding a clip as a whole", found["decode"], None),
        ("decoding in tiles (`model.vae_tiling`)", found["decode_tiled"], None),
    ]
    cells = [
        [
            name,
            fixed(one["seconds"], 2),
            fixed(one["gib_peak"], 1),
            "" if formula is None else fixed(sum(formula.values()), 1),
        ]
        for name, one, formula in rows
    ]
    return _table(["", "seconds", "GiB at the peak", "formula"], cells)


def one_iteration(file: Path) -> str:
    """Phases of an iteration without and with FSDP, in seconds and GiB."""
    runs = json.loads(file.read_text())["runs"]
    cells = [
        [kind, *(fixed(runs[name][key], 1) for name in ("plain", "fsdp") for key in keys)]
        for kind, keys in (
            (phase, (f"time/{phase}", f"time/peak_gib_{phase}")) for phase in ("rollout", "decode", "reward", "update")
        )
    ]
    cells.append(["total", fixed(runs["plain"]["time/total"], 1), "", fixed(runs["fsdp"]["time/total"], 1), ""])
    cells.append(
        ["gradient norm", f"{runs['plain']['gradient/norm']:.3e}", "", f"{runs['fsdp']['gradient/norm']:.3e}", ""]
    )
    return _table(["phase", "plain: seconds", "GiB", "FSDP: seconds", "GiB"], cells)


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
    """research/benchmarks/whole_iteration.py: seconds and peaks of a phase, measured and planned."""
    cells = [
        [found["case"], *(fixed(value, 1) for key in ("seconds", "gib") for value in found["phases"][phase][key])]
        for found in read(file)
    ]
    return _table(["case", "seconds", "plan", "GiB", "plan"], cells)


def under_limits(file: Path) -> str:
    """research/benchmarks/whole_iteration.py with --limit: what a process may have, its peak, and the planned one."""
    cells = [
        [found["case"], *(fixed(value, 1) for value in (found["limit_gib"], *found["phases"]["iteration"]["gib"]))]
        for found in read(file)
    ]
    return _table(["case", "GiB at most", "peak", "plan"], cells)


def crew(file: Path, prompts: str) -> str:
    """research/benchmarks/workers.py, the row of so many prompts: seconds and megabytes with and without workers, beside plan (its seconds are of one process)."""
    rows = [found for found in read(file) if found["plan"]["tasks"] == int(prompts)]
    plan, runs = rows[-1]["plan"], rows[-1]["runs"]
    planned = plan["phases"] | {"total": sum(plan["phases"].values())}
    told = {name: (f"time/{name}", 1, planned[name]) for name in ("rollout", "decode", "update")}
    told["iteration"] = ("time/total", 1, planned["total"])
    told["records back, MB"] = ("crew/megabytes", 4, None)
    told["largest gap of a log-probability"] = ("crew/gap", 1, None)
    cells = [
        [
            name,
            *(
                "" if value is None else fixed(value, digits)
                for value in (*(run.get(key) for run in runs.values()), said)
            ),
        ]
        for name, (key, digits, said) in told.items()
    ]
    return _table(["seconds", *runs, "plan, one process"], cells)


def memory_by_gpus(file: Path) -> str:
    """The table of research/benchmarks/scale_table.py: all of it is a formula."""
    from scale_table import table

    return table()


def peaks(file: Path) -> str:
    """Distance of measured peaks of memory from the formula, at most: a bound in per cent, which holds because it is rounded up."""
    found = json.loads(file.read_text())
    gaps = []
    for part in found.values():
        if isinstance(part, dict) and "formula_gib" in part:
            formula = sum(part["formula_gib"].values())
            gaps += [abs(part[kind]["gib_peak"] / formula - 1) for kind in ("plain", "fsdp") if kind in part]
    # Rounded up, so that the bound holds; from the shortest decimal of the float, as 0.02 is a bound of 2%.
    return f"{(100 * Decimal(repr(max(gaps)))).to_integral_value(ROUND_CEILING)}%"


def iteration(file: Path) -> str:
    """Passes and seconds of an iteration at full size, by method."""
    from branch_iteration import HEADS, cells, rows

    return _table(HEADS, [cells(row) for row in rows(file)])


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


def scores(folder: Path) -> str:
    """The table of a comparison."""
    from sage_grpo.tools.compare.report import tables

    return tables(summary_of(folder)).split("\n\n")[0]


def differences(folder: Path) -> str:
    """Paired differences from the baseline."""
    from sage_grpo.tools.compare.report import tables

    parts = tables(summary_of(folder)).split("\n\n")
    return parts[1] if len(parts) > 1 else "There is nothing to compare."


def value(folder: Path, arm: str, column: str = "", kind: str = "final") -> str:
    """One number of a comparison. kind: final, difference (from the baseline), way, equal (at equal passes), equal_difference, clips (at equal
    clips), clips_difference, base."""
    from sage_grpo.tools.compare.report import percent as share
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.text import number as plain

    summary = summary_of(folder)
    found, key = summary.arms[arm], column or summary.suite.columns[0].key
    if kind in ("final", "difference"):
        return plus_minus(getattr(found, kind)[key], signed=kind == "difference")
    if kind == "base":
        return plain(found.base[key])
    if kind == "way":
        return share(found.way)
    return plus_minus(getattr(found, kind).get(key), signed=kind.endswith("difference"))


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
            plus_minus(arm.clips_difference.get(first), signed=True) if arm.clips_difference else "",
            plus_minus(arm.equal[first]),
            plus_minus(arm.equal_difference.get(first), signed=True) if arm.equal_difference else "",
        ]
        for arm in summary.arms.values()
    ]
    return _table([head.replace("branch", summary.suite.baseline) for head in heads], rows)


def both(folder: Path, other: str) -> str:
    """Two comparisons of the same methods side by side, each minus its baseline: ahead or behind where the interval excludes zero, else level."""
    from sage_grpo.tools.compare.report import plus_minus

    first, second = summary_of(folder), summary_of(folder.parent / other)
    heads = ["method"]
    for axis in ("clips", "passes"):
        heads += [f"equal {axis}, {folder.name}", f"equal {axis}, {other}", "so"]
    rows = []
    for name in (name for name in first.arms if name in second.arms and name != first.suite.baseline):
        cells = [name]
        for kind in ("clips_difference", "equal_difference"):
            found = [getattr(one.arms[name], kind).get(one.suite.columns[0].key) for one in (first, second)]
            sides = [_side(one) for one in found]
            cells += [plus_minus(one, signed=True) for one in found]
            cells.append(f"{sides[0]} in both" if sides[0] == sides[1] else " / ".join(sides))
        rows.append(cells)
    return _table(heads, rows)


def _side(difference: Any) -> str:
    if difference is None:
        return "-"
    away = difference.mean > difference.half or difference.mean < -difference.half
    return "level" if not away else "ahead" if difference.mean > 0 else "behind"


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


def equal_seconds(folder: Path) -> str:
    """Seconds of an iteration, and the first column when the baseline's run is over, on the line between evaluations; evaluating is not counted, and a
    run that is over sooner has its end."""
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.statistics import mean_interval

    summary = summary_of(folder)
    baseline, first = summary.suite.baseline, summary.suite.columns[0]
    paces = {
        name: statistics.fmean(row["seconds"]["iteration"] for row in _runs(folder, name)) for name in summary.arms
    }
    whole = max(row["iterations"] for row in _runs(folder, baseline)) * paces[baseline]
    theirs = _after_seconds(folder, baseline, whole / paces[baseline], first.key)
    rows = []
    for name, pace in paces.items():
        found = _after_seconds(folder, name, whole / pace, first.key)
        cells = [
            name,
            fixed(pace, 2),
            fixed(pace / paces[baseline], 1),
            plus_minus(mean_interval(list(found.values()))),
        ]
        rows.append([*cells, "" if name == baseline else _minus(found, theirs)])
    heads = ["arm", "seconds an iteration", f"in those of {baseline}", f"{first.title} after {baseline}'s seconds"]
    return _table([*heads, f"minus {baseline}"], rows)


def _after_seconds(folder: Path, arm: str, iterations: float, key: str) -> dict[int, float]:
    """A column by seed after so many iterations, which need not be whole."""
    found = {}
    for row in _runs(folder, arm):
        points = sorted((int(point), scores[key]) for point, scores in row["evaluations"].items())
        there = min(iterations, points[-1][0])
        (before, low), (after, high) = next(pair for pair in pairwise(points) if there <= pair[1][0])
        found[row["seed"]] = low + (high - low) * (there - before) / (after - before)
    return found


def gap_at_equal(folder: Path, column: str, value: str, arm: str, other: str) -> str:
    """One of these differences."""
    return _minus(*(_reached(folder, name, column, float(value)) for name in (arm, other)))


def _minus(ours: dict[int, float], theirs: dict[int, float]) -> str:
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.statistics import paired_interval

    return plus_minus(paired_interval(ours, theirs), signed=True) if len(ours.keys() & theirs.keys()) > 1 else ""


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


def by_seed(folder: Path, arm: str, column: str = "Overall", digits: str = "3") -> str:
    """A column of every seed's end, in the order of the seeds."""
    ends = _ends(folder, arm, column)
    return ", ".join(fixed(ends[seed], int(digits)) for seed in sorted(ends))


def seeds_beyond(folder: Path, arm: str, column: str = "Overall", share: str = "", below_base: str = "") -> str:
    """In how many seeds a run ended beyond a share of the way to the ceiling, or (below_base=yes) below where it began."""
    key = next(one for one in summary_of(folder).suite.columns if one.key == column)
    found = []
    for row in _runs(folder, arm):
        base, last = row["evaluations"]["0"][column], row["evaluations"][str(row["iterations"])][column]
        found.append(last < base if below_base else last >= base + float(share) * (key.ceiling - base))
    return f"{sum(found)} of {len(found)}"


def told(folder: Path, arm: str, finding: str) -> str:
    """First findings of a run's sentinel: seed and iteration, of every run that it did."""
    firsts = [
        (row["seed"], [n for n, name, _ in row.get("sentinel", []) if name == finding]) for row in _runs(folder, arm)
    ]
    return ", ".join(f"seed {seed} after {known[0]} iterations" for seed, known in firsts if known) or "no run"


def first_words(folder: Path, arm: str) -> str:
    """First finding of every run's sentinel, and after how many iterations, by seed."""
    firsts = [next(iter(row["sentinel"]), None) for row in _runs(folder, arm)]
    return ", ".join("nothing" if first is None else f"{first[1]} {first[0]}" for first in firsts)


def told_in_time(folder: Path, arm: str, column: str = "Overall", share: str = "3") -> str:
    """In how many runs the sentinel spoke before a column had lost one part in so many of its peak gain."""
    runs, good = _runs(folder, arm), 0
    for row in runs:
        curve = {int(point): scores[column] for point, scores in row["evaluations"].items()}
        base, peak = curve[0], max(curve.values())
        first = next((number for number, _, _ in row["sentinel"]), None)
        if first is not None:
            then = curve[max(point for point in curve if point <= first)]
            good += peak - then < (peak - base) / int(share)
    return f"{good} of {len(runs)}"


def acted(folder: Path, arm: str) -> str:
    """In how many runs the sentinel did more than warn."""
    runs = _runs(folder, arm)
    return f"{sum(any(action != 'warn' for _, _, action in row['sentinel']) for row in runs)} of {len(runs)}"


PART_SIGNS = ("part_lost", "held_out_part_fell")


def told_and_went_on(folder: Path, least: str = "90") -> str:
    """In how many arms of all comparisons beside this one, with runs of at least so many iterations, those that were told of a part and went on end lower in
    Overall than those that were told nothing of one."""
    lower = arms = 0
    for place in sorted(file.parent for file in folder.parent.glob("*/suite.json")):
        for arm in summary_of(place).arms:
            ends: dict[bool, list[float]] = {True: [], False: []}
            runs = [row for row in _runs(place, arm) if "Overall" in row["evaluations"].get(str(row["reached"]), {})]
            for row in runs:
                if row["reached"] >= int(least) and all(action == "warn" for _, _, action in row["sentinel"]):
                    told = any(name in PART_SIGNS for _, name, _ in row["sentinel"])
                    ends[told].append(row["evaluations"][str(row["reached"])]["Overall"])
            if ends[True] and ends[False] and len(runs) >= 3:
                arms += 1
                lower += statistics.fmean(ends[True]) < statistics.fmean(ends[False])
    return f"{lower} of {arms}"


def went_back(folder: Path, arm: str) -> str:
    """Every run whose sentinel went back: seed, and after how many iterations."""
    found = [
        (row["seed"], [n for n, _, action in row["sentinel"] if action == "rollback"]) for row in _runs(folder, arm)
    ]
    return ", ".join(f"seed {seed} after {' and '.join(map(str, after))}" for seed, after in found if after) or "no run"


def on_the_way(folder: Path, arm: str, seed: str, column: str = "Overall", points: str = "", digits: str = "3") -> str:
    """A column of one seed's run where it was evaluated, or at some of these iterations."""
    (row,) = [row for row in _runs(folder, arm) if row["seed"] == int(seed)]
    wanted = _words(points) or sorted(row["evaluations"], key=int)
    return ", ".join(fixed(row["evaluations"][point][column], int(digits)) for point in wanted)


def past_best(folder: Path, arm: str, column: str = "Overall") -> str:
    """In how many runs a score was higher at some evaluation than at the end."""
    runs = [
        [scores[column] for _, scores in sorted(row["evaluations"].items(), key=lambda one: int(one[0]))]
        for row in _runs(folder, arm)
    ]
    return f"{sum(max(scores) > scores[-1] for scores in runs)} of {len(runs)}"


def ahead_of(folder: Path, arm: str, other: str, column: str = "Overall") -> str:
    """In how many seeds an arm ends above another."""
    last = [_ends(folder, name, column) for name in (arm, other)]
    both = last[0].keys() & last[1].keys()
    return f"{sum(last[0][seed] > last[1][seed] for seed in both)} of {len(both)}"


def between(folder: Path, arm: str, other: str, column: str = "Overall") -> str:
    """Difference of an arm's end from another's, seed by seed."""
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.statistics import paired_interval

    own, others = (_ends(folder, name, column) for name in (arm, other))
    return plus_minus(paired_interval(own, others), signed=True)


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


def made(folder: Path) -> str:
    """Command, machine, commit and seeds of a comparison."""
    suite, rows, command = loaded(folder)
    machines = sorted({row["machine"]["device"] for row in rows if "machine" in row})
    commits = sorted({row["commit"] for row in rows if row.get("commit")})
    # Rows are older than suites as files.
    command = re.sub(r"python benchmarks/long_runs\.py", "sage-grpo", command)
    if (Path(__file__).parents[1] / "suites" / f"{folder.name}.yaml").is_file():
        command = re.sub(r"--suite (\w+)(?= |$)", r"--suite research/suites/\1.yaml", command)
    place = f"research/results/{folder.name}/runs.jsonl"
    asked = len(suite.arms) * len(suite.seeds)
    runs = f"{len(rows)} runs" if len(rows) == asked else f"{len(rows)} of {asked} runs made"
    return (
        f"`{command}`, {', '.join(machines)}, commit {', '.join(commits) or 'unknown'}, {len(suite.seeds)} seeds, {runs}. Data: "
        f"[{place}]({folder.name}/runs.jsonl); `sage-grpo compare --table research/results/{folder.name} --out runs/{folder.name}-drawn` draws it again."
    )


def leaderboard(file: Path, most: str = "20") -> str:
    """The best entries of the leaderboard."""
    from sage_grpo.tools.compare.report import plus_minus
    from sage_grpo.utils.statistics import Interval

    def cell(found: dict[str, Any] | None, *, signed: bool = False) -> str:
        if found is None:
            return "–"
        half = math.nan if found["half"] is None else found["half"]
        return plus_minus(Interval(found["mean"], half, found["count"]), signed=signed)

    content = json.loads(file.read_text())
    rows = [
        [
            str(entry["place"]["passes"]),
            str(entry["place"]["clips"]),
            entry["name"] + (" (supervised)" if entry["supervised"] else ""),
            ", ".join(entry["trained_on"]),
            cell(entry["at"]["passes"]),
            cell(entry["at"]["clips"]),
            cell(entry["final"]["Overall"]),
            fixed(entry["passes"], 0, grouped=True),
            cell(entry["final"]["drift"]),
            cell(entry["gain_own"], signed=True),
            cell(entry["gain_true"], signed=True),
        ]
        for entry in content["entries"][: int(most)]
    ]
    budgets = [f"Overall at {most:,} {name}" for name, most in content["rules"]["budgets"].items()]
    heads = ["place by passes", "place by clips", "entry", "trained on", *budgets, "Overall at the end"]
    return _table([*heads, "passes", "drift", "gain in its reward", "gain in truth"], rows)


# ---- side by side


def timed(file: Path, model: str, variant: str, what: str = "total", digits: str = "3", over: str = "") -> str:
    """Seconds of research/benchmarks/side_by_side: of a phase of the whole job, or of a pass; divided by those of the variant that `over` names."""

    def seconds(name: str) -> float:
        line = [line for line in read(file) if (line["model"], line["variant"]) == (model, name)][-1]
        return line["job_seconds"][what] if what in line.get("job_seconds", {}) else line["passes"][what]["seconds"]

    return f"{seconds(variant) / (seconds(over) if over else 1.0):.{digits}g}"


# ---- which steps gain and which pay


def where(file: Path, seed: str, columns: str = "Overall,VQ,MQ,TA/shape,TA/size,drift") -> str:
    """Scores with the trained weights at some of the steps only."""
    rows = [row for row in read(file) if row["seed"] == int(seed)]
    places = ", ".join(map(str, rows[0]["at"]))
    cells = [[f"`{row['pattern']}`", *(fixed(row[name], 3) for name in _words(columns))] for row in rows]
    return _table([f"seed {seed}, {rows[0]['iteration']} iterations at {places}", *_words(columns)], cells)


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
"""By name; all of them give Markdown but `read`, `loaded` and `summary_of`, which serve the others."""
