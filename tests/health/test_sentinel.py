"""What the sentinel finds, and that it finds nothing where nothing is wrong: synthetic faults, and curves of real runs replayed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from watching import clips, curves, healthy_row, names, watched

from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.sentinel import Finding, Sentinel
from sage_grpo.training.optim import AdaptiveRate

Break = Callable[[dict[str, float]], dict[str, float]]
FROM, LONG = 30, 60

FAULTS: dict[str, tuple[str, Break]] = {
    "constant reward": ("spread_vanished", lambda row: {"reward/group_std": 0.0}),
    "exploding gradient": ("gradient_exploded", lambda row: {"gradient/norm": 60 * row["gradient/norm"]}),
    "ratio": ("ratio_off", lambda row: {"ratio/largest_log": 80 * row["ratio/largest_log"]}),
    "replay of another policy": ("replay_differs", lambda row: {"ratio/first_log": 0.5}),
    "collapse": ("diversity_collapsed", lambda row: {"video/spread": 0.002}),
    "NaN": ("not_finite", lambda row: {"gradient/norm": math.nan}),
    "no reward at all": ("not_finite", lambda row: {"reward/total": None}),
}


def broken(fault: Break | None, *, seed: int = 0, **options) -> tuple[Sentinel, list[Finding]]:
    """A run of 60 iterations in which something goes wrong after 30."""
    draw, sentinel, found = random.Random(seed), Sentinel(SentinelConfig(**options), clips=48, clip_range=0.01), []
    for number in range(1, LONG + 1):
        row = {**healthy_row(number, draw), "optimizer/kl": 0.01 * math.exp(draw.gauss(0, 0.5))}
        if fault is not None and number > FROM:
            row |= fault(row)
        found += sentinel.observe(number, row)
    return sentinel, found


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found_under_its_name_and_soon(what: str) -> None:
    name, fault = FAULTS[what]
    _, found = broken(fault)
    assert names(found) == [name]
    patience = 1 if name == "not_finite" else 3
    assert found[0].iteration == FROM + patience
    acted = next(finding.iteration for finding in found if finding.act)
    assert acted == FROM + (1 if name == "not_finite" else 2 * patience)  # told first, then acted on


def test_a_healthy_run_raises_nothing() -> None:
    sentinel, found = broken(None)
    assert not found
    assert sentinel.sound


def test_a_single_outlier_is_no_finding() -> None:
    assert not watched(lambda number: {"gradient/norm": 200.0} if number % 10 in (0, 1) else {}, seed=3)[1]


def test_a_target_kl_below_what_rounding_alone_has_is_told_and_not_acted_on() -> None:
    """The measured case: 0.05 nats at any rate, a target of 0.01. The rate falls to nothing, and every other figure looks healthy."""

    def run(target: float) -> list[Finding]:
        pace = AdaptiveRate(target)

        def row(number: int) -> dict[str, float]:
            now = {"optimizer/lr_factor": pace.factor, "optimizer/kl": 0.05 + 0.1 * pace.factor**2}
            pace.observe(now["optimizer/kl"])
            return now

        return watched(row, count=90)[1]

    assert names(run(0.25)) == names(run(0.08)) == []
    found = run(0.01)
    assert names(found) == ["rate_at_floor"]
    assert not any(finding.act for finding in found)
    assert "0.05 nats" in found[0].text
    assert "optimizer.target_kl" in found[0].text


def test_a_rate_that_findings_have_lowered_is_not_at_its_floor() -> None:
    """The factor has the sentinel's own brake in it; with a limit alone it is nothing else."""
    sentinel = Sentinel(SentinelConfig())
    sentinel.brake = 1e-3
    rows = [healthy_row(number, random.Random(number)) | {"optimizer/kl": 0.02} for number in range(1, 31)]
    for first, factor, told in ((1, 1e-3, []), (31, 1e-6, ["rate_at_floor"])):
        found = [sentinel.observe(n, row | {"optimizer/lr_factor": factor}) for n, row in enumerate(rows, first)]
        assert names([one for some in found for one in some]) == told


def evaluations(*means: dict[str, float], scatter: float = 0.05) -> list[Finding]:
    sentinel = Sentinel(SentinelConfig(), witnesses={"judge": {"true": 1.0}} if "true" in means[0] else {})
    found: list[Finding] = []
    for number, point in enumerate(means):
        scores = {name: clips(mean, seed=100 * number + len(name), scatter=scatter) for name, mean in point.items()}
        found += sentinel.evaluated(10 * number, scores)
    return found


def test_hacking_is_a_witness_that_falls_while_the_total_rises() -> None:
    rising = [{"total": 0.2 + 0.1 * n, "true": true} for n, true in enumerate((1.0, 1.2, 1.25, 1.19, 1.1))]
    found = evaluations(*rising)
    assert names(found) == ["decoupled", "hacking"]
    assert all(finding.iteration >= 30 for finding in found)
    hacking = [(finding.iteration, finding.act) for finding in found if finding.name == "hacking"]
    assert hacking == [(30, False), (40, True)]
    together = [{"total": 0.2 + 0.1 * n, "true": 1.0 + 0.1 * n} for n in range(5)]
    assert not evaluations(*together)
    both_stand = [{"total": 0.4, "true": true} for true in (1.0, 1.2, 1.25, 1.22, 1.22)]
    assert not evaluations(*both_stand)


@pytest.mark.parametrize("what", ["NaN", "no reward at all"])
def test_what_is_remembered_of_odd_figures_is_json(what: str) -> None:
    sentinel, _ = broken(FAULTS[what][1])
    last = sentinel.state_dict()["recent"][-1]
    assert [last[name] for name in FAULTS[what][1](last)] == [None]
    json.dumps(sentinel.state_dict(), allow_nan=False)


# ---- real runs


@pytest.mark.parametrize("file", ["methods_h200.jsonl", "branch_270_h200.jsonl"])
def test_held_out_curves_of_healthy_runs_raise_nothing(file: str) -> None:
    """Runs of branch, which all learned to the end, with dips of up to a tenth of their gain."""
    for seed, curve in curves(file, "branch")[:4]:
        found = evaluations(*[{"total": total} for _, total in sorted(curve.items())], scatter=0.05)
        assert not found, (seed, found)
