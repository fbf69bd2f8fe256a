"""The shapes world as a benchmark (docs/benchmark.md): arms that kept its rules, their scores, and which are not distinguishable.

PYTHONPATH=src python research/benchmarks/leaderboard.py FOLDER    # of a comparison with research/benchmarks/benchmark.yaml
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Suite
from sage_grpo.tools.compare.summary import Cells, cells, difference, end, interval, within
from sage_grpo.utils.json_schema import finite
from sage_grpo.utils.statistics import Interval, mean_interval
from sage_grpo.version import __version__

FORMAT = 2
BUDGETS = {"passes": 22_680, "clips": 6_480}
"""Network evaluations and scored clips (reward calls) within which entries are compared: those of 135 iterations of branch."""


@dataclass(frozen=True)
class Edition:
    """Seeds that change with each version, so that tuning on one version does not carry over to the next."""

    seeds: tuple[int, ...]
    """Of the runs: all of them, and no others."""
    noise: int
    """`evaluate.seed`: the start noises of the held-out clips."""


EDITIONS = {"0.1": Edition(tuple(range(6001, 6009)), 1234)}
EDITION = EDITIONS[__version__.rpartition(".")[0]]
EVALUATION = {
    "evaluate.prompts": 256,
    "evaluate.per_prompt": 2,
    "evaluate.steps": 20,
    "evaluate.seed": EDITION.noise,
}
"""Settings of the evaluation, on the held-out split."""
FIXED = ("model.", "data.", "evaluate.")
"""Fields that an entry cannot set, except for EVALUATION."""
TRUTH = ("Overall", "drift", "flicker")
"""Exact scores, independent of the trained reward; flicker where it was measured."""

Row = Mapping[str, Any]


def board(comparisons: Sequence[tuple[Suite, Sequence[Row]]]) -> dict[str, Any]:
    """The content of leaderboard.json: entries of all comparisons, best first, and the reasons against other arms."""
    entries, left_out = list[dict[str, Any]](), dict[str, str]()
    scores = list[dict[str, Cells]]()
    for suite, rows in comparisons:
        for arm in suite.arms:
            runs = [row for row in rows if row["arm"] == arm.name]
            reason = broken_rule(suite, runs)
            if reason:
                left_out[f"{suite.name}: {arm.name}"] = reason
                continue
            by_seed = {row["seed"]: row for row in runs}
            scores.append({name: cells(by_seed, "Overall", within(name)) for name in BUDGETS})
            entries.append(_entry(suite, by_seed, scores[-1]))
    for own, entry in zip(scores, entries):
        # Entries not distinguishable from the best share the first place, and so on.
        entry["place"] = {
            name: 1 + sum(difference(other[name], own[name]).low > 0 for other in scores) for name in BUDGETS
        }
    entries.sort(key=lambda entry: (entry["place"]["passes"], -entry["at"]["passes"]["mean"]))
    rules = {"version": __version__, "budgets": BUDGETS, "seeds": list(EDITION.seeds), "evaluation": EVALUATION}
    return {"format": FORMAT, "rules": rules, "entries": entries, "left_out": left_out}


def broken_rule(suite: Suite, runs: Sequence[Row]) -> str:
    """The reason against an entry; empty for an entry."""
    if suite.kind != "train":
        return "nothing was trained"
    seeds = [row["seed"] for row in runs if row["status"] == "done"]
    other, lacking = [s for s in seeds if s not in EDITION.seeds], [s for s in EDITION.seeds if s not in seeds]
    if other:
        return f"seed {other[0]} is not one of this version's ({EDITION.seeds[0]} to {EDITION.seeds[-1]})"
    if lacking:
        return f"seed {lacking[0]} is missing: a run that diverged or was left out counts as one"
    for name, wanted in BUDGETS.items():
        if getattr(suite, name) != wanted:
            return f"the suite's budget of {name} must be {wanted:,}"
        if not all(name in row.get("budgets", {}) for row in runs):
            return f"a run ended before {wanted:,} {name}"
    settings: Mapping[str, Any] = next((row["settings"] for row in runs if row["settings"]), {})
    if not runs[0]["recipe"].startswith("shapes/") or runs[0]["recipe"].endswith((".yaml", ".yml")):
        return f"recipe {runs[0]['recipe']} is not of the shapes world"
    for name, wanted in EVALUATION.items():
        if settings.get(name, wanted if name == "evaluate.seed" else None) != wanted:
            return f"{name} must be {wanted}"
    changed = [name for name in settings if name.startswith(FIXED) and name not in EVALUATION]
    if changed:
        return f"{changed[0]} is not free"
    for row in runs:
        points = [str(row["iterations"]), *(str(row["budgets"][name]) for name in BUDGETS)]
        if any(row["evaluations"].get(point, {}).get(name) is None for point in points for name in TRUTH[:2]):
            return "the judge was not among the rewards"
        if not all(row.get("by_prompt", {}).get(point, {}).get("Overall") for point in points):
            return "scores by prompt are missing"
    return ""


def _entry(suite: Suite, runs: Mapping[int, Row], at: Mapping[str, Cells]) -> dict[str, Any]:
    rows = list(runs.values())
    last = [row["evaluations"].get(end(row), {}) for row in rows]
    first = [row["evaluations"].get("0", {}) for row in rows]
    settings: Mapping[str, Any] = next((row["settings"] for row in rows if row["settings"]), {})
    rewards = settings.get("rewards", [{"name": "shapes"}])
    measured = [name for name in TRUTH if all(score.get(name) is not None for score in last)]
    return {
        "name": f"{suite.name}: {rows[0]['arm']}",
        "recipe": rows[0]["recipe"],
        "settings": {k: v for k, v in settings.items() if k not in (*EVALUATION, "rewards")},
        "trained_on": [reward["name"] for reward in rewards if not reward.get("metric_only")],
        # Training on rendered clips shows the answer: allowed, and marked.
        "supervised": any(row.get("supervised", False) for row in rows),
        "at": {name: _plain(interval(found)) for name, found in at.items()},
        "passes": sum(row["passes"][end(row)] for row in rows) / len(rows),
        "final": {name: _plain(interval(cells(runs, name, end))) for name in measured},
        "gain_true": _gain(first, last, "Overall"),
        "gain_own": _gain(first, last, "total"),
        "commit": sorted({row["commit"] for row in rows if row.get("commit")}),
    }


def _gain(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """The gain of a run in a score. One in its own reward alone is reward hacking."""
    if any(score.get(name) is None for score in (*first, *last)):
        return None
    return _plain(mean_interval([after[name] - before[name] for before, after in zip(first, last)]))


def _plain(value: Interval) -> dict[str, Any]:
    """All digits: places are decided, and pages round, on measured values."""
    return finite({"mean": value.mean, "half": value.half, "count": value.count})


def main(folder: Path) -> None:
    """Print the entries of a comparison as leaderboard.json has them, and the reason why an arm is none."""
    suite, keys, _ = store.load_suite(folder)
    print(
        json.dumps(board([(suite, list(store.latest(store.read_rows(folder / store.ROWS), keys).values()))]), indent=1)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
