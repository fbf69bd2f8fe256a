"""A part of the reward that is lost while the total looks harmless: synthetic runs, and recorded ones in which it happened or did not."""

from __future__ import annotations

import json
import random

import pytest
from watching import RESULTS, healthy_row

from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import RewardParts, change
from sage_grpo.health.sentinel import Finding, Sentinel
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import RewardSpec

WEIGHTS = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
RUNS = [json.loads(line) for line in (RESULTS / "parts_cpu.jsonl").read_text().splitlines()]
LOST = {(1001, (2, 3)): ("reward/TA/size", 60), (1000, (2,)): ("reward/TA/size", 140)}
"""What was lost in recorded runs, and the iteration until which it must have been told."""


def found_in(rows: list[dict[str, float]], sentinel: Sentinel | None = None, first: int = 1) -> list[Finding]:
    sentinel = sentinel or Sentinel(SentinelConfig(), clips=96, clip_range=0.01, trained=WEIGHTS)
    return [finding for number, row in enumerate(rows, first) for finding in sentinel.observe(number, row)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['seed']}-{run['at']}")
def test_recorded_runs(run: dict) -> None:
    columns, parts = run["rows"], RewardParts(WEIGHTS, 20)
    rows = [{f"reward/{name}": column[n] for name, column in columns.items()} for n in range(len(columns["total"]))]
    told = {n: text for n in range(1, len(rows) + 1) if (text := parts.observe(rows[max(0, n - 40) : n]))}
    lost = LOST.get((run["seed"], tuple(run["at"])))
    assert (lost is not None) == any({n, n + 1, n + 2} <= told.keys() for n in told), "three in a row are told"
    if lost is not None:
        assert min(told) <= lost[1] - 3
        assert lost[0] in told[min(told)]


def rows_of(level, *, scatter: float = 0.05, seed: int = 0, count: int = 100) -> list[dict[str, float]]:
    draw, rows = random.Random(seed), []
    for number in range(count):
        parts = {"reward/a": level(number), "reward/b": number / 100}
        rows.append(healthy_row(number, draw) | {name: mean + draw.gauss(0, scatter) for name, mean in parts.items()})
    return rows


def two(weight: float = 1.0) -> Sentinel:
    return Sentinel(SentinelConfig(), clips=48, clip_range=0.01, trained={"a": weight, "b": 1.0})


def test_a_part_that_rose_and_then_falls_is_compared_with_its_best() -> None:
    found = found_in(rows_of(lambda number: min(number, 100 - number) / 50), two())
    assert [finding.name for finding in found][:1] == ["part_lost"]
    assert "reward/a" in found[0].text
    assert "reward/b" not in found[0].text
    assert found[0].iteration > 50


def test_scatter_is_no_loss() -> None:
    assert not found_in(rows_of(lambda number: 0.5, scatter=0.3, count=200), two())


def test_only_what_counts_is_a_part() -> None:
    parts = RewardParts({"TA": 1.0, "VQ": 0.0, "judge/MQ": 0.5}, 20)
    assert not parts.falling
    row = dict.fromkeys(
        ("reward/TA", "reward/TA/size", "reward/VQ", "reward/judge/MQ", "reward/judge", "reward/failed/TA", "reward/total", "TA"), 0.0
    )  # fmt: skip
    assert parts.of(row) == ["reward/TA", "reward/TA/size", "reward/judge/MQ"]


def test_a_run_knows_what_it_is_trained_on(make_config) -> None:
    judge = RewardSpec(name="shapes", weights=WEIGHTS)
    config = make_config(rewards=[judge, RewardSpec(name="video_stats", metric_only=True, weights={"sharpness": 1.0})])
    sentinel = Sentinel.of(config.sentinel, CompositeReward(config.rewards), clips=8, clip_range=0.01)
    assert sentinel.parts.weights == WEIGHTS


def evaluation(means: dict[str, float], draw: random.Random, *, noise: float = 0.1) -> dict[str, list[float]]:
    """Scores of 128 held-out prompts: each has a level of its own, the same at every evaluation, and some noise. The total is as it was."""
    levels = random.Random(7)
    prompts = [levels.gauss(0, 0.1) for _ in range(128)]
    parts = {name: [mean + own + draw.gauss(0, noise) for own in prompts] for name, mean in means.items()}
    return {"total": prompts, **parts}


def evaluations(
    sentinel: Sentinel, *means: dict[str, float], seed: int = 0, first: int = 0, noise: float = 0.1
) -> list[Finding]:
    draw = random.Random(seed)
    return [
        finding
        for number, one in enumerate(means, first)
        for finding in sentinel.evaluated(10 * number, evaluation(one, draw, noise=noise))
    ]


def judged_by(*names: str) -> Sentinel:
    return Sentinel(SentinelConfig(), clips=48, clip_range=0.01, trained=dict.fromkeys(names, 1.0))


def test_a_part_below_the_base_is_told_at_the_first_evaluation_after_it() -> None:
    """Before there is a window of iterations to compare with: what is lost in the first ones."""
    base, lost = {"TA": 0.7, "TA/size": 0.8, "VQ": 0.7}, {"TA": 0.75, "TA/size": 0.66, "VQ": 0.8}
    sentinel = judged_by("TA", "VQ")
    assert not evaluations(sentinel, base)
    assert sentinel.sound
    (told,) = evaluations(sentinel, lost, seed=1, first=1)
    assert (told.name, told.iteration, told.act) == ("held_out_part_fell", 10, False)
    assert "TA/size is 0.1" in told.text
    assert "VQ" not in told.text
    assert not sentinel.sound, "weights that lost a part are none to go back to"
    (again,) = evaluations(sentinel, lost, seed=2, first=2)
    assert again.act


def test_a_held_out_part_is_compared_with_its_best_evaluation() -> None:
    points = [{"a": level, "b": 0.5} for level in (0.5, 0.7, 0.9, 0.75)]
    assert [finding.iteration for finding in evaluations(judged_by("a", "b"), *points)] == [30]
    assert not evaluations(judged_by("a"), *[{"a": point["a"]} for point in points]), "one part is the total"
    falling = Sentinel(SentinelConfig(), clips=48, clip_range=0.01, trained={"a": -1.0, "b": 1.0})
    assert [finding.iteration for finding in evaluations(falling, *points)] == [10, 20, 30], "what shall fall rose"


def test_what_is_not_sure_at_once_is_told_at_the_second_evaluation() -> None:
    """3.7 standard errors: too many for weights to go back to, too few to speak of once."""
    base = {"a": 0.5, "b": 0.5}
    draw = random.Random(0)
    first, later = evaluation(base, draw), evaluation(base, draw)
    stderr = change(later["a"], first["a"]).stderr
    shift = 3.7 * stderr - change(later["a"], first["a"]).by
    later["a"] = [value - shift for value in later["a"]]
    sentinel = judged_by("a", "b")
    assert not sentinel.evaluated(0, first)
    assert not sentinel.evaluated(10, later)
    assert not sentinel.sound
    second = judged_by("a", "b")
    second.load_state_dict(json.loads(json.dumps(sentinel.state_dict())))
    (told,) = second.evaluated(20, later)
    assert told.name == "held_out_part_fell"
    back = judged_by("a", "b")
    back.load_state_dict(json.loads(json.dumps(sentinel.state_dict())))
    assert not back.evaluated(20, first)
    assert not back.evaluated(30, later), "two in a row, not two in all"


def test_clips_of_a_prompt_are_one_observation() -> None:
    draw = random.Random(2)
    one = [evaluation({"a": level, "b": 0.5}, draw, noise=0.2) for level in (0.5, 0.41)]
    four = [{name: [value for value in column for _ in range(4)] for name, column in scores.items()} for scores in one]
    for scores, per_prompt in ((one, 1), (four, 4)):
        sentinel = judged_by("a", "b")
        assert not [f for number, now in enumerate(scores) for f in sentinel.evaluated(number, now, per_prompt)]
