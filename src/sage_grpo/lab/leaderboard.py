"""The shapes world as a benchmark (docs/benchmark.md): which arms of a comparison kept its rules, and what they scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sage_grpo.documents import finite
from sage_grpo.lab.design import Suite
from sage_grpo.lab.summary import at_passes, reached
from sage_grpo.statistics import Interval, mean_interval

FILE = "leaderboard.json"
FORMAT = 1
BUDGET = 22_680
"""Network passes at which entries are ranked: 135 iterations of branch, 26 of sage."""
SEEDS = 8
"""Seeds that an entry has at least."""
EVALUATION = {"evaluate.prompts": 128, "evaluate.steps": 20}
"""How entries are evaluated: these, on the held-out split and with the evaluation's own noises."""
FIXED = ("model.", "data.", "evaluate.")
"""Fields that an entry cannot set, except for EVALUATION."""
TRUTH = ("Overall", "drift", "flicker")
"""What nobody can argue with, whatever a run was trained on; flicker where it was measured."""

Row = Mapping[str, Any]


def board(suite: Suite, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of leaderboard.json: entries with the best first, and why other arms are none."""
    entries, left_out = [], {}
    for arm in suite.arms:
        runs = [row for row in rows if row["arm"] == arm.name]
        reason = broken_rule(suite, runs)
        if reason:
            left_out[arm.name] = reason
        else:
            entries.append(_entry(suite, runs))
    return {
        "format": FORMAT,
        "rules": {"budget": BUDGET, "seeds": SEEDS, "evaluation": EVALUATION},
        "entries": ranked(entries),
        "left_out": left_out,
    }


def ranked(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Best first: by the score at the budget; those that do not reach it come last, by their final score."""

    def place(entry: Mapping[str, Any]) -> tuple[float, float]:
        at_budget, final = entry["at_budget"], entry["final"]["Overall"]
        return (-math.inf if at_budget is None else at_budget["mean"], final["mean"])

    return sorted(entries, key=place, reverse=True)


def broken_rule(suite: Suite, runs: Sequence[Row]) -> str:
    """Why an arm is no entry; empty where it is one."""
    if suite.kind != "train":
        return "nothing was trained"
    ended = [row for row in runs if row["status"] in ("done", "diverged")]
    seeds = {row["seed"] for row in ended}  # a run that is there twice is one seed
    if len(seeds) < SEEDS:
        return f"{len(seeds)} seeds, {SEEDS} are needed"
    settings: Mapping[str, Any] = next((row["settings"] for row in runs if row["settings"]), {})
    if not runs[0]["recipe"].startswith("shapes/"):
        return f"recipe {runs[0]['recipe']} is not of the shapes world"
    for name, wanted in EVALUATION.items():
        if settings.get(name) != wanted:
            return f"{name} must be {wanted}"
    changed = [name for name in settings if name.startswith(FIXED) and name not in EVALUATION]
    if changed:
        return f"{changed[0]} is not free"
    finals = [row["evaluations"][str(row["iterations"])] for row in ended if reached(row)]
    if not finals:
        return "no run reached its end"
    if any(final.get(name) is None for final in finals for name in TRUTH[:2]):
        return "the judge was not among the rewards"
    return ""


def _entry(suite: Suite, runs: Sequence[Row]) -> dict[str, Any]:
    ended = [row for row in runs if reached(row)]
    last = [row["evaluations"][str(row["iterations"])] for row in ended]
    first = [row["evaluations"].get("0", {}) for row in ended]
    # A run that ended before the budget, or diverged, has no score there; one of them and the entry has none.
    budgeted = [at_passes(row, "Overall", BUDGET) for row in runs]
    known = [value for value in budgeted if value is not None]
    settings: Mapping[str, Any] = next((row["settings"] for row in runs if row["settings"]), {})
    rewards = settings.get("rewards", [{"name": "shapes"}])
    return {
        "name": f"{suite.name}: {runs[0]['arm']}",
        "recipe": runs[0]["recipe"],
        "settings": {k: v for k, v in settings.items() if k not in (*EVALUATION, "rewards")},
        "trained_on": [reward["name"] for reward in rewards if not reward.get("metric_only")],
        "seeds": len(ended),
        "diverged": sum(row["status"] == "diverged" for row in runs),
        "passes": sum(row["passes"][str(row["iterations"])] for row in ended) / len(ended),
        "at_budget": _plain(mean_interval(known)) if len(known) == len(runs) else None,
        "final": {name: _plain(mean_interval([s[name] for s in last])) for name in TRUTH if _all(last, name)},
        "gain_true": _gain(first, last, "Overall"),
        "gain_own": _gain(first, last, "total"),
        "commit": sorted({row["commit"] for row in runs if row.get("commit")}),
    }


def _all(scores: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(score.get(name) is not None for score in scores)


def _gain(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """How much a run added to a score. Own without true is a reward that was hacked."""
    if not (_all(first, name) and _all(last, name)):
        return None
    return _plain(mean_interval([after[name] - before[name] for before, after in zip(first, last)]))


def _plain(value: Interval) -> dict[str, Any]:
    """All digits: places are decided, and pages round, on what was measured."""
    return finite({"mean": value.mean, "half": value.half, "count": value.count})
