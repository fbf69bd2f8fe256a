"""The table of the rows that were measured before there was `sage-grpo compare`, which makes new ones.

    PYTHONPATH=src python benchmarks/methods.py table benchmarks/results/methods_h200.jsonl

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
from sage_grpo.printing import fixed, markdown
from sage_grpo.statistics import mean_interval, paired_interval


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
    return "\n".join(markdown(heads, [[found[name][head] for head in heads] for name in only or found]))


def at_cost(run: dict[str, Any], budget: float, base: float) -> float:
    """The score where a run had cost as much, between the evaluations before and after."""
    reached = budget / run["cost"]
    points = sorted((int(number), scores["total"]) for number, scores in run["curve"].items() if int(number) > 0)
    points = [(0, base), *points]
    for (low, before), (high, after) in pairwise(points):
        if low <= reached <= high:
            return before + (after - before) * (reached - low) / (high - low)
    return points[-1][1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--at", type=int, default=135)
    parser.add_argument("--baseline", default="branch")
    options = parser.parse_args()
    print(table(options.file, options.at, options.baseline))
