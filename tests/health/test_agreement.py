"""How a witness goes together with what is trained on: within groups, over time, and with held-out clips; found early, and not found where it is honest."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from watching import healthy_row, names

from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import shortfall
from sage_grpo.health.sentinel import MOST_REMEMBERED, Finding, Sentinel
from sage_grpo.health.statistics import agreements
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run as train
from sage_grpo.training.config import EvalConfig
from trainer_helpers import assert_same_run, interrupt, rows

WATCHED = {"judge": {"true": 1.0}}
MEAN, STDERR = "reward/agreement/judge", "reward/agreement_stderr/judge"


def agreed(total: list[float], judge: list[float], groups: list[int]) -> dict[str, float]:
    columns = [torch.tensor(column, dtype=torch.float64) for column in (total, judge)]
    return agreements(columns[0], {"true": columns[1]}, torch.tensor(groups), WATCHED)


def test_agreement_is_within_groups_and_has_a_sign() -> None:
    """Between these two groups both rise together; within each the judge prefers what the total does not."""
    groups, total = [0, 0, 0, 1, 1, 1], [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]
    against = [3.0, 2.0, 1.0, 13.0, 12.0, 11.0]
    assert agreed(total, against, groups)[MEAN] == pytest.approx(-1.0)
    assert agreed(total, [-score for score in against], groups)[MEAN] == pytest.approx(1.0)
    assert agreed(total, [5.0, 5.1, 5.2, 0.3, 0.2, 0.1], groups)[MEAN] == pytest.approx(0.0)


def test_a_rate_that_is_not_sure_makes_a_shortfall_that_is_not() -> None:
    """All scatter is in the first gain. Over many worlds the shortfall scatters by what it says itself."""
    draw, found = random.Random(0), []
    for _ in range(300):
        first = [0.0] * 40
        middle = [0.1 + draw.gauss(0, 0.3) for _ in first]
        witness = [first, middle, [score + 0.2 for score in middle]]
        found.append(shortfall([first, [1.0] * 40, [3.0] * 40], witness))
    mean = sum(one.by for one in found) / len(found)
    scatter = math.sqrt(sum((one.by - mean) ** 2 for one in found) / len(found))
    assert scatter == pytest.approx(sum(one.stderr for one in found) / len(found), rel=0.15)
    assert scatter > 0.08


def test_clips_of_a_prompt_are_one_observation() -> None:
    sentinel = Sentinel(SentinelConfig())
    sentinel.evaluated(0, {"total": [1.0] * 8}, per_prompt=4)
    drops = [0.30, 0.32, 0.31, 0.33, 0.01, -0.01, 0.0, 0.02]
    assert not sentinel.evaluated(1, {"total": [1.0 - drop for drop in drops]}, per_prompt=4)


def world(
    kind: str, seed: int, clips: int = 64
) -> list[tuple[int, dict[str, float], dict[str, list[float | None]] | None]]:
    """Sixty iterations with the scatter of real runs: per clip 0.07 an iteration that is forgotten over ten, agreements +- 0.2.

    The total rises throughout. The witness follows ever more slowly, barely moves, or gains at first and then stands still or falls.
    """  # fmt: skip
    draw = random.Random(f"{kind} {seed}")
    own = [draw.gauss(1.3, 0.3) for _ in range(clips)]
    away, result = [0.0] * clips, []
    scale = 1e-3 if kind == "nearly constant" else 1.0
    for number in range(61):
        gain = {"follows": 0.2 * (1 - math.exp(-number / 20)), "nearly constant": 0.0}.get(
            kind, 0.08 * (1 - math.exp(-number / 3))
        )
        fall = 0.005 * max(0, number - 6) if kind == "hacked" else 0.0
        level = {"hacked": 0.4 if number <= 6 else 0.0, "nearly constant": 0.0}.get(kind, 0.4)
        judge = [scale * (score + gain - fall + noise) for score, noise in zip(own, away)]
        total = [0.2 + 0.3 * (1 - math.exp(-number / 30)) + draw.gauss(0, 0.02) for _ in own]
        look = {"total": total, "true": judge} if number in (*range(0, 13, 2), *range(15, 61, 5)) else None
        result.append((number, {MEAN: level + draw.gauss(0, 0.2), STDERR: 0.2}, look))
        away = [0.9 * noise + draw.gauss(0, 0.07) for noise in away]
    return result


def watch(kind: str, seed: int, *, agreement: bool = True) -> list[Finding]:
    sentinel, found = Sentinel(SentinelConfig(), witnesses=WATCHED), []
    for number, row, look in world(kind, seed):
        found += sentinel.observe(number, row if agreement else {}) if number else []
        found += sentinel.evaluated(number, look) if look else []
    return found


@pytest.mark.parametrize(
    "kind", ["follows", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nearly constant", "saturates"))]
)
def test_an_honest_witness_is_never_acted_on_and_hardly_ever_told(kind: str) -> None:
    """Of 100 such runs, each with 17 evaluations, 11, 7 and 27 are told and 0, 2 and 1 acted on; here there are four.

    One at its ceiling may be told more often: before it falls, nothing but the agreement distinguishes it from one that is about to.
    """
    found = [watch(kind, seed) for seed in range(4)]
    assert not [finding for run in found for finding in run if finding.act]
    assert sum(bool(run) for run in found) <= (2 if kind == "saturates" else 1)


def test_a_hacked_reward_is_found_and_acted_on() -> None:
    for seed in range(3):
        found = watch("hacked", seed)
        assert found[0].name in ("decoupled", "hacking")
        assert found[0].iteration <= 20, seed
        assert [finding for finding in found if finding.act and finding.name == "hacking"], seed


def test_a_continued_run_finds_the_same() -> None:
    def fresh() -> Sentinel:
        return Sentinel(SentinelConfig(), clips=48, clip_range=0.01, witnesses=WATCHED, trained={"a": 1.0, "b": 1.0})

    whole, again, draw = fresh(), fresh(), random.Random(2)
    found: list[list[Finding]] = [[], []]
    for number, row, look in world("hacked", 1):
        full = healthy_row(number, draw) | row
        full |= {"gradient/norm": 60 * full["gradient/norm"]} if number > 30 else {}
        lost = max(0, number - 30) / 20
        parts = {"a": 0.5 - lost, "b": 0.5 + lost}
        full |= {f"reward/{name}": level + draw.gauss(0, 0.05) for name, level in parts.items()}
        for name, level in parts.items() if look else ():
            look[name] = [level + draw.gauss(0, 0.02) for _ in look["total"]]
        for place, sentinel in enumerate((whole, again)):
            found[place] += sentinel.observe(number, full) if number else []
            found[place] += sentinel.evaluated(number, look) if look else []
        if number % 8 == 0:
            state = json.loads(json.dumps(again.state_dict(), allow_nan=False))
            again = fresh()
            again.load_state_dict(state)
    assert found[0] == found[1]
    assert whole.state_dict() == again.state_dict()
    assert {"hacking", "held_out_part_fell", "gradient_exploded"} <= set(names(found[0]))


def test_memory_is_bounded_and_keeps_the_start() -> None:
    sentinel = Sentinel(SentinelConfig(), witnesses=WATCHED)
    for number in range(100):
        sentinel.evaluated(number, {"total": [float(number)] * 2, "true": [0.0, 1.0]})
    assert len(sentinel.remembered) <= MOST_REMEMBERED
    assert sentinel.remembered[0].scores["total"][0] == 0.0
    without = Sentinel(SentinelConfig())
    without.evaluated(0, {"total": [1.0, 2.0]})
    assert not without.remembered
    # Every reward may fail once: nothing is said of it, and later evaluations are compared as if it had not been.
    failing, none = Sentinel(SentinelConfig(), witnesses=WATCHED), {"total": [None] * 3, "true": [None] * 3}
    some = {"total": [0.1, 0.2, 0.3], "true": [1.0, 1.1, 1.2]}
    assert not [
        found for number, look in enumerate((none, some, none, some)) for found in failing.evaluated(number, look)
    ]
    assert len(failing.remembered) == 2


@pytest.mark.slow
def test_a_run_logs_agreement_and_is_continued_to_the_bit(make_config, tmp_path: Path) -> None:
    config = make_config(
        iterations=6,
        rewards=[
            RewardSpec(name="trainer_toys:bright", batch_size=0),
            RewardSpec(name="trainer_toys:bright", label="same", metric_only=True, batch_size=0),
            RewardSpec(name="trainer_toys:flat", label="flat", metric_only=True, batch_size=0),
        ],
        evaluate=EvalConfig(every=4, early=[1], prompts=2, steps=2, show=0),
    )  # fmt: skip
    whole, broken = (replace(config, out=str(tmp_path / name)) for name in ("whole", "broken"))
    train(whole)
    trained = [row for row in rows(whole) if "reward/total" in row]
    assert all(row["reward/agreement/same"] == pytest.approx(1.0) for row in trained)
    assert not [name for row in trained for name in row if name.endswith("/flat") and "agreement" in name]
    assert [row["iteration"] for row in rows(whole) if "eval/total" in row] == [0, 1, 4, 6]
    interrupt(broken, at=11)
    train(broken)
    assert_same_run(whole, broken)
