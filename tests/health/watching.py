"""Histories for the sentinel: synthetic rows of a run, held-out scores with a given mean and scatter, and recorded curves replayed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.sentinel import Finding, Sentinel

RESULTS = Path(__file__).parents[2] / "research" / "benchmarks" / "results"


def healthy_row(number: int, draw: random.Random) -> dict[str, float]:
    """A row as a run of the shapes world with two updates has them: norms and KLs scatter by factors, the reward rises."""
    return {
        "reward/total": 1.2 + 0.3 * (1 - math.exp(-number / 40)) + draw.gauss(0, 0.08),
        "reward/group_std": 0.15 * math.exp(draw.gauss(0, 0.25)),
        "reward/failed": float(draw.random() < 0.1),
        "ratio/mean": 1 + draw.gauss(0, 1e-4),
        "ratio/largest_log": 0.02 * math.exp(draw.gauss(0, 0.4)),
        "ratio/first_log": 0.0,
        "ratio/clip_fraction": min(1.0, max(0.0, draw.gauss(0.2, 0.06))),
        "gradient/norm": 1.0 * math.exp(draw.gauss(0, 0.35)),
        "kl/total": 1e-4 * (1 + number % 5) * math.exp(draw.gauss(0, 0.4)),
        "weights/distance": 1e-3 * math.sqrt(number) * (1 + draw.gauss(0, 0.01)),
        "weights/moved": 0.999,
        "video/spread": 0.05 * math.exp(draw.gauss(0, 0.15)),
    }


def watched(
    figures: Callable[[int], Mapping[str, float]], *, count: int = 60, seed: int = 0, **options: Any
) -> tuple[Sentinel, list[Finding]]:
    """A healthy run but for `figures(iteration)`, from 1 on."""
    draw, sentinel = random.Random(seed), Sentinel(SentinelConfig(**options), clips=48, clip_range=0.01)
    found = []
    for number in range(1, count + 1):
        found += sentinel.observe(number, healthy_row(number, draw) | figures(number))
    return sentinel, found


def clips(mean: float, *, seed: int, scatter: float = 0.12, count: int = 48) -> list[float | None]:
    """Scores of held-out clips with exactly this mean; each clip differs from itself at another time by `scatter` x sqrt(2)."""
    own, then = random.Random(7), random.Random(seed)
    levels = [own.gauss(0, 0.3) + then.gauss(0, scatter) for _ in range(count)]
    return [mean + level - sum(levels) / count for level in levels]


def curves(file: str, method: str) -> list[tuple[int, dict[int, float]]]:
    """Held-out totals of recorded comparisons: (seed, iteration -> total). All seeds start from the same weights."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    start = next(row["curve"]["0"] for row in rows if "0" in row["curve"])
    mine = [row for row in rows if row["method"] == method]
    return [
        (row["seed"], {0: start["total"], **{int(at): point["total"] for at, point in row["curve"].items()}})
        for row in mine
    ]


def names(found: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in found))
