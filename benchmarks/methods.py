"""Rows that were measured before there was `sage-grpo compare`, which makes new ones: their tables, and the rows as a folder of it.

    PYTHONPATH=src python benchmarks/methods.py table benchmarks/results/methods_h200.jsonl
    PYTHONPATH=src python benchmarks/methods.py compare benchmarks/results/methods_h200.jsonl --out FOLDER

A row has the held-out scores of 128 prompts at every evaluated iteration and the network's cost of an iteration: one per sample and
forward pass, three per sample forward and backward. Runs had seed 1000 + `seed`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from sage_grpo.lab.statistics import mean_interval


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval over seeds."""
    found = mean_interval(values)
    return found.mean, found.half


def table(options: argparse.Namespace) -> int:
    """Markdown: scores at equal iterations, at equal network cost, and paired differences from the first method."""
    rows = read(options.file)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    first = options.baseline if options.baseline in methods else methods[0]
    by = {m: {row["seed"]: row for row in rows if row["method"] == m} for m in methods}
    budget = options.at * next(iter(by[first].values()))["cost"]
    print(
        f"| method | seeds | cost | s / it | {options.at} iterations | {first} minus it | drift | at {first}'s cost |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for method in methods:
        runs = by[method]
        point = str(options.at)
        ended = [run for run in runs.values() if point in run["curve"]]
        if not ended:
            continue
        mean, half = interval([run["curve"][point]["total"] for run in ended])
        drift, drift_half = interval([run["curve"][point]["drift"] for run in ended])
        shared = [s for s in runs if s in by[first] and point in runs[s]["curve"] and point in by[first][s]["curve"]]
        gap, gap_half = interval(
            [by[first][s]["curve"][point]["total"] - runs[s]["curve"][point]["total"] for s in shared]
        )
        equal, equal_half = interval([at_cost(run, budget) for run in ended])
        print(
            f"| {method} | {len(ended)} | {ended[0]['cost']:.0f} | {statistics.mean(r['seconds_per_iteration'] for r in ended):.2f} "
            f"| {mean:.3f} ± {half:.3f} | {gap:+.3f} ± {gap_half:.3f} | {drift:.4f} ± {drift_half:.4f} | {equal:.3f} ± {equal_half:.3f} |"
        )
    return 0


def at_cost(run: dict[str, Any], budget: float) -> float:
    """The score where a run had cost as much, between the evaluations before and after."""
    reached = budget / run["cost"]
    points = sorted((int(number), scores["total"]) for number, scores in run["curve"].items() if int(number) > 0)
    points = [(0, BASE), *points]
    for (low, before), (high, after) in pairwise(points):
        if low <= reached <= high:
            return before + (after - before) * (reached - low) / (high - low)
    return points[-1][1]


def as_comparison(options: argparse.Namespace) -> int:
    """The rows as those of `sage-grpo compare`, whose tables, figures and leaderboard then serve them too."""
    from sage_grpo.lab import store
    from sage_grpo.lab.design import FIRST_SEED, Arm, Column, Suite
    from sage_grpo.lab.suites.common import DRIFT, OVERALL
    from sage_grpo.recipes import recipe

    rows = read(options.file)
    base = next(row["curve"]["0"] for row in rows if "0" in row["curve"])  # the same for all: one model, fixed noises
    evaluation = {"evaluate.prompts": 128, "evaluate.steps": 20}
    names = list(dict.fromkeys(row["method"] for row in rows))
    starts = {name: "shapes/sage" if name == "sage_all" else f"shapes/{name}" for name in names}
    own = {name: {**evaluation, **({"update.step_fraction": 1.0} if name == "sage_all" else {})} for name in names}
    found = []
    for row in rows:
        curve = {"0": base, **row["curve"]}
        last = row["iterations"]
        found.append(
            {
                **{"suite": "methods", "format": store.FORMAT, "arm": row["method"], "recipe": starts[row["method"]]},
                **{"seed": FIRST_SEED + row["seed"], "key": f"{row['method']}-{row['seed']}-{last}", "kind": "train"},
                **{"status": "done", "error": None, "iterations": last, "reached": last},
                "settings": own[row["method"]] | {"iterations": last},
                "evaluations": {point: {**scores, "Overall": scores["total"]} for point, scores in curve.items()},
                "passes": {point: int(point) * row["cost"] for point in curve},
                **{
                    "updates": last * recipe(starts[row["method"]]).update.updates_per_rollout,
                    "training": {},
                    "steps": {},
                    "commit": "",
                },
                "seconds": {"iteration": row["seconds_per_iteration"], "evaluate": 0.0, "total": row["seconds"]},
                **{"machine": {"device": row["device"]}, "versions": {"torch": row["torch"]}, "code": ""},
            }
        )
    suite = Suite(
        name="methods",
        title="Eight methods over 135 iterations",
        question="Which method learns most, at equal iterations and at equal network passes?",
        arms=tuple(Arm(name=name, recipe=starts[name], options=own[name]) for name in names),
        baseline="branch",
        seeds=tuple(sorted({row["seed"] for row in found})),
        iterations=max(row["iterations"] for row in found),
        columns=(OVERALL, *(Column(key=key) for key in ("VQ", "MQ", "TA")), DRIFT),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    store.write(options.out / store.ROWS, "".join(json.dumps(row) + "\n" for row in found).encode())
    store.save_suite(
        options.out, suite, [row["key"] for row in found], "benchmarks/methods.py run --seeds 8 --iterations 135"
    )
    return 0


BASE = 1.28282
"""Held-out score of the miniature before training."""


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    show = parts.add_parser("table")
    show.add_argument("file", type=Path)
    show.add_argument("--at", type=int, default=135)
    show.add_argument("--baseline", default="branch")
    convert = parts.add_parser("compare")
    convert.add_argument("file", type=Path)
    convert.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return as_comparison(options) if options.what == "compare" else table(options)


if __name__ == "__main__":
    raise SystemExit(main())
