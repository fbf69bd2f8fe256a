"""The rows that were measured before there was `sage-grpo compare`, which makes new ones: their table, and the way to `compare`.

    PYTHONPATH=src python benchmarks/methods.py table benchmarks/results/methods_h200.jsonl
    PYTHONPATH=src python benchmarks/methods.py compare benchmarks/results/methods_h200.jsonl --out FOLDER    # docs/results/methods

A row has the held-out scores of 128 prompts at every evaluated iteration and the network's cost of an iteration: one per sample and
forward pass, three per sample forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from sage_grpo.lab.report import plus_minus
from sage_grpo.rounding import fixed
from sage_grpo.statistics import mean_interval, paired_interval

ALIKE: dict[str, Any] = {
    "batch.trained_fraction": 1.0,
    "kernel.eta": 0.5,
    "advantage.scale": "group",
    "surrogate.clip_scale": 0.3,
    "kl.lambda_max": 1e-5,
    "update.step_fraction": 0.6,
    "update.updates_per_rollout": 2,
    "update.deal": "steps",
}
ONE_STEP = {"update.step_fraction": 1.0, "update.updates_per_rollout": 1}
THEN: dict[str, dict[str, Any]] = {
    "flow_grpo": ALIKE,
    "dance_grpo": ALIKE,
    "mix_grpo": {**ALIKE, "rollout.window.length": 2, "rollout.window.every": 7},
    "flash_grpo": {**ALIKE, **ONE_STEP, "kernel.name": "flow", "rollout.window.at": None},
}
"""What these recipes were when the rows were measured; now they are as each method's authors run it."""


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def base_of(rows: list[dict[str, Any]]) -> float:
    """Held-out score of the miniature before training: the same in all runs, one model with fixed noises, and measured in some."""
    return float(next(row["curve"]["0"]["total"] for row in rows if "0" in row["curve"]))


def cells(file: Path, at: int, baseline: str) -> dict[str, dict[str, str]]:
    """Method -> heading -> text: scores at equal iterations, at equal network cost, and differences from the baseline, seed by seed."""
    everything = read(file)
    base, rows = base_of(everything), [row for row in everything if str(at) in row["curve"]]
    by = {
        name: {row["seed"]: row for row in rows if row["method"] == name}
        for name in dict.fromkeys(row["method"] for row in rows)
    }
    first = baseline if baseline in by else next(iter(by))
    budget, point = at * next(iter(by[first].values()))["cost"], str(at)
    found = {}
    for name, ended in by.items():
        score = mean_interval([run["curve"][point]["total"] for run in ended.values()])
        drift = mean_interval([run["curve"][point]["drift"] for run in ended.values()])
        gap = paired_interval(*({s: r["curve"][point]["total"] for s, r in by[m].items()} for m in (first, name)))
        equal = mean_interval([at_cost(run, budget, base) for run in ended.values()])
        seconds = statistics.mean(run["seconds_per_iteration"] for run in ended.values())
        found[name] = {
            "method": name,
            "seeds": str(len(ended)),
            "cost": fixed(next(iter(ended.values()))["cost"], 0),
            "s / it": fixed(seconds, 2),
            f"{at} iterations": plus_minus(score),
            f"{first} minus it": plus_minus(gap, signed=True),
            "drift": plus_minus(drift),
            f"at {first}'s cost": plus_minus(equal),
        }
    return found


def table(
    file: Path, at: int = 135, baseline: str = "branch", only: tuple[str, ...] = (), heads: tuple[str, ...] = ()
) -> str:
    """Markdown; `only` these methods and `heads` where they are given."""
    found = cells(file, at, baseline)
    heads = heads or tuple(next(iter(found.values())))
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(found[n][head] for head in heads) + " |" for n in only or found)])


def at_cost(run: dict[str, Any], budget: float, base: float) -> float:
    """The score where a run had cost as much, between the evaluations before and after."""
    reached = budget / run["cost"]
    points = sorted((int(number), scores["total"]) for number, scores in run["curve"].items() if int(number) > 0)
    points = [(0, base), *points]
    for (low, before), (high, after) in pairwise(points):
        if low <= reached <= high:
            return before + (after - before) * (reached - low) / (high - low)
    return points[-1][1]


def as_comparison(file: Path, out: Path) -> None:
    """The rows as those of `sage-grpo compare`, whose tables, figures and leaderboard then serve them too."""
    from sage_grpo.lab import store
    from sage_grpo.lab.design import FIRST_SEED, Arm, Column, Suite
    from sage_grpo.lab.suites.common import DRIFT, OVERALL
    from sage_grpo.recipes import recipe

    rows = read(file)
    base = next(row["curve"]["0"] for row in rows if "0" in row["curve"])  # the same for all: one model, fixed noises
    evaluation = {"evaluate.prompts": 128, "evaluate.steps": 20}
    names = list(dict.fromkeys(row["method"] for row in rows))
    starts = {name: "shapes/sage" if name == "sage_all" else f"shapes/{name}" for name in names}
    own = {name: {**evaluation, **({"update.step_fraction": 1.0} if name == "sage_all" else {})} for name in names}
    now = {name: recipe(starts[name]).update.updates_per_rollout for name in names}
    updates = {name: THEN.get(name, {}).get("update.updates_per_rollout", now[name]) for name in names}
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
                    "updates": last * updates[row["method"]],
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
        arms=tuple(Arm(name=name, recipe=starts[name], options=THEN.get(name, {}) | own[name]) for name in names),
        baseline="branch",
        seeds=tuple(sorted({row["seed"] for row in found})),
        iterations=max(row["iterations"] for row in found),
        columns=(OVERALL, *(Column(key=key) for key in ("VQ", "MQ", "TA")), DRIFT),
    )
    out.mkdir(parents=True, exist_ok=True)
    store.write(out / store.ROWS, "".join(json.dumps(row) + "\n" for row in found).encode())
    store.save_suite(out, suite, [row["key"] for row in found], "benchmarks/methods.py run --seeds 8 --iterations 135")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--at", type=int, default=135)
    parser.add_argument("--baseline", default="branch")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    options = parser.parse_args()
    if options.what == "compare":
        as_comparison(options.file, options.out)
    else:
        print(table(options.file, options.at, options.baseline))
