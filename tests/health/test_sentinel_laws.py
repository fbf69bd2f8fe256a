"""What single figures of the sentinel are compared with, and that weights which it doubts do not become the best."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import NormalDist, fmean

import pytest
import torch
from safetensors.torch import load_file
from test_reward_parts import evaluation, judged_by, rows_of, two
from watching import clips, healthy_row, names, watched

import trainer_toys
from sage_grpo.callbacks.journal import read_events
from sage_grpo.health.checks import SIGNS, MetricHistory, robust
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import by_prompt, change, weighted
from sage_grpo.health.sentinel import Sentinel
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run as train
from sage_grpo.training.config import EvalConfig, KeepConfig, UpdateConfig
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.trainer import Trainer
from trainer_helpers import same, weights_of

# ---- rows


def test_the_robust_deviation_is_the_standard_deviation_where_figures_are_normal() -> None:
    normal = [3.0 + 2.0 * NormalDist().inv_cdf((place + 0.5) / 1001) for place in range(1001)]
    assert robust(normal) == pytest.approx((3.0, 2.0), rel=2e-3)
    assert robust([*normal[:-300], *[1e9] * 10])[1] < 3.0, "outliers have no say in it"


def test_a_figure_is_out_of_range_beyond_so_many_standard_deviations() -> None:
    """Logarithms of norms with a standard deviation of 1/2: six of them are a factor of 20, ten one of 150."""
    known = [math.exp(0.5 * NormalDist().inv_cdf((2 * place + 1) / 40)) for place in range(20)]
    middle, deviation = robust([math.log(norm) for norm in known])
    assert deviation == pytest.approx(0.5, rel=0.06)
    for deviations in (6.0, 10.0):
        limit = math.exp(middle + deviations * 0.5)
        for factor, told in ((0.7, False), (1.5, True)):
            figures = dict(enumerate([*known, *[factor * limit] * 3], 1))
            found = watched(lambda at: {"gradient/norm": figures[at]}, count=23, deviations=deviations)[1]  # noqa: B023
            assert ("gradient_exploded" in names(found)) == told


@pytest.mark.parametrize(
    ("name", "figure", "first", "last"),
    [
        ("spread_vanished", "reward/group_std", 0.15, 0.15 / 60),
        ("spread_exploded", "reward/group_std", 0.003, 52.0),
        ("diversity_collapsed", "video/spread", 0.05, 0.05 / 20),
    ],
)
def test_what_creeps_is_compared_with_the_start(name: str, figure: str, first: float, last: float) -> None:
    _, found = watched(lambda number: {figure: first * (last / first) ** (number / 200)}, count=200)
    assert names(found) == [name]


@pytest.mark.parametrize("at", [8, 30])
def test_an_exploded_spread_is_told_as_a_vanished_one_is(at: int) -> None:
    draw = random.Random(1)

    def figures(number: int) -> dict[str, float]:
        return {"reward/group_std": (0.003 if number < at else 52.0) * math.exp(draw.gauss(0, 0.25))}

    sentinel, found = watched(figures)
    assert [(finding.name, finding.iteration, finding.act) for finding in found[:2]] == [
        ("spread_exploded", at + 2, False),
        ("spread_exploded", at + 5, True),
    ]
    assert names(found) == ["spread_exploded"]
    assert sentinel.open == ["spread_exploded"], "it does not become the usual"
    assert not sentinel.sound
    assert sentinel.doubts == ["spread_exploded"]


@pytest.mark.parametrize("nothing", [0.0, 1e-9])
def test_a_reward_that_few_clips_get_does_not_explode_when_more_do(nothing: float) -> None:
    """Most iterations of the start have no spread at all, or one that is rounding."""
    draw = random.Random(0)

    def figures(number: int) -> dict[str, float]:
        some = draw.random() < (0.2 if number < 30 else 0.95)
        return {"reward/group_std": 0.3 * math.exp(draw.gauss(0, 0.25)) if some else nothing}

    assert "spread_exploded" not in names(watched(figures)[1])
    assert "spread_exploded" not in names(watched(lambda number: {"reward/group_std": 0.3 * (number >= 30)})[1])
    early = watched(lambda number: {"reward/group_std": 52.0 if number == 3 or number > 30 else 0.003})[1]
    assert (early[0].name, early[0].iteration) == ("spread_exploded", 33), "an outlier of the start hides nothing"


def past(**figures: list[float]) -> MetricHistory:
    """Twenty rows, at the start and before now, that have these figures one after the other."""
    named = {"/".join(name.split("__")): column for name, column in figures.items()}
    rows = [{name: column[place % len(column)] for name, column in named.items()} for place in range(20)]
    return MetricHistory(start=rows, recent=rows, clips=40, clip_range=0.01, deviations=6.0)


STEADY = past(
    reward__group_std=[0.2], reward__total=[1.0], video__spread=[0.1], gradient__norm=[1.0], kl__total=[1e-4], optimizer__kl=[1e-2],
    ratio__largest_log=[2e-3],
)  # fmt: skip


def test_the_second_largest_spread_of_the_start_is_its_range() -> None:
    for now, told in ((7.9, False), (8.1, True)):
        found = SIGNS["spread_exploded"]({"reward/group_std": now}, past(reward__group_std=[0.2, 0.4]))
        assert bool(found) == told


@pytest.mark.parametrize(
    ("name", "figure", "limit", "above"),
    [
        ("spread_vanished", "reward/group_std", 0.2 / 20, False),
        ("spread_exploded", "reward/group_std", 0.2 * 20, True),
        ("rewards_failing", "reward/failed", 0.1 * 40, True),
        ("replay_differs", "ratio/first_log", 0.01, True),
        ("replay_differs", "ratio/first_update", 0.01, True),  # its name in runs of earlier versions
        ("ratio_off", "ratio/mean", 1.1, True),
        ("ratio_off", "ratio/mean", 0.9, False),
        ("ratio_off", "ratio/largest_log", 2e-3 * 10, True),
        ("clipped_away", "ratio/clip_fraction", 0.75, True),
        ("gradient_exploded", "gradient/norm", 5.0, True),
        ("kl_away", "kl/total", 1e-3, True),
        ("kl_away", "optimizer/kl", 0.1, True),
        ("weights_stuck", "weights/moved", 0.01, False),
        ("diversity_collapsed", "video/spread", 0.1 / 5, False),
    ],
)
def test_the_limits_are_those_of_the_manual(name: str, figure: str, limit: float, above: bool) -> None:
    """docs/reading-a-run.md: on one side of a limit there is a sign, on the other none."""
    for factor in (0.999, 1.001):
        row = {"gradient/norm": 1.0, figure: limit * factor}
        assert bool(SIGNS[name](row, STEADY)) == (above == (factor > 1)), factor


def test_signs_that_need_more_than_one_figure() -> None:
    for largest, told in ((0.009, False), (0.011, True)):  # the clip range is 0.01
        assert bool(SIGNS["ratio_off"]({"ratio/largest_log": largest}, past(ratio__largest_log=[1e-5]))) == told
    assert SIGNS["weights_stuck"]({"weights/moved": 0.0, "gradient/norm": 0.0}, STEADY) == "", "nothing to move by"
    scattered = past(gradient__norm=[math.exp(x) for x in (-2, -1, 0, 1, 2)])
    assert SIGNS["gradient_exploded"]({"gradient/norm": math.exp(8.8)}, scattered) == ""  # six times 1.4826
    assert SIGNS["gradient_exploded"]({"gradient/norm": math.exp(9.0)}, scattered)
    assert not SIGNS["gradient_exploded"]({"gradient/norm": 9.0}, past(gradient__norm=[0.0])), "0 has no range"
    rounding = past(reward__group_std=[1e-4], reward__total=[-1e3])
    assert not SIGNS["spread_exploded"]({"reward/group_std": 1.0}, rounding), "equal scores in float32"
    few = MetricHistory(start=STEADY.start[:4], recent=STEADY.recent[:4], clips=40, clip_range=0.01, deviations=6.0)
    broken = dict.fromkeys(("gradient/norm", "kl/total"), 1e9)
    broken |= {"reward/group_std": 0.0, "video/spread": 0.0}
    assert not [name for name, sign in SIGNS.items() if sign(broken, few)], "too few rows to compare with"


# ---- parts


def test_the_best_of_a_part_is_that_of_whole_windows() -> None:
    """The best of all windows that overlap would be the luckiest of twenty times as many."""
    rows = rows_of(lambda number: 1.0 if 10 <= number < 30 else 0.5, scatter=0.01, count=60)
    sentinel = two()
    found = [finding for number, row in enumerate(rows, 1) for finding in sentinel.observe(number, row)]
    assert not found
    best, _ = sentinel.parts.best["reward/a"]
    assert best == pytest.approx(fmean(row["reward/a"] for row in rows[:20]), abs=0.02)
    high = rows_of(lambda number: 1.0 if 20 <= number < 40 else 0.5, scatter=0.01, count=80)
    again = two()
    assert names([f for number, row in enumerate(high, 1) for f in again.observe(number, row)]) == ["part_lost"]


def test_a_part_that_could_not_be_scored_is_not_one_that_scored_nothing() -> None:
    draw = random.Random(3)
    points = [evaluation({"a": 0.6, "b": 0.5}, draw) for _ in range(3)]
    for name in ("a", "b"):
        points[1][name] = [None if place % 3 == 0 else value for place, value in enumerate(points[1][name])]
    sentinel = judged_by("a", "b")
    assert not [finding for number, scores in enumerate(points) for finding in sentinel.evaluated(number, scores)]
    assert not sentinel.parts.falling
    points[2]["a"] = [None] * len(points[2]["a"])
    assert not sentinel.evaluated(3, points[2])
    assert not sentinel.parts.falling


@pytest.mark.parametrize(
    ("sigmas", "falling", "at_once", "twice"),
    [
        (2.4, False, False, False),
        (2.6, True, False, False),
        (3.2, True, False, False),
        (3.3, True, False, True),
        (4.1, True, True, True),
    ],
)
def test_how_sure_a_lost_part_must_be(sigmas: float, falling: bool, at_once: bool, twice: bool) -> None:
    draw = random.Random(5)
    first, later = evaluation({"a": 0.5, "b": 0.5}, draw), evaluation({"a": 0.5, "b": 0.5}, draw)
    off = change(later["a"], first["a"])
    later["a"] = [value + off.by - sigmas * off.stderr for value in later["a"]]
    later["b"] = first["b"]
    sentinel = judged_by("a", "b")
    sentinel.evaluated(0, first)
    assert bool(sentinel.evaluated(1, later)) == at_once
    assert sentinel.falling == falling
    assert bool(sentinel.evaluated(2, later)) == twice


def test_sums_and_means_leave_out_what_could_not_be_scored() -> None:
    scores = {"a": [1.0, None, 3.0, None], "b": [10.0, 20.0, None, None]}
    assert weighted(scores, {"a": 2.0, "b": 0.5}) == [7.0, None, None, None]
    assert by_prompt([1.0, None, None, None, 0.0, 4.0], 2) == [1.0, None, 2.0]


# ---- evaluations


def held_out(number: int, **means: float) -> dict[str, list[float | None]]:
    return {name: clips(mean, seed=100 * number + len(name), scatter=0.05) for name, mean in means.items()}


def with_witness() -> Sentinel:
    return Sentinel(SentinelConfig(), witnesses={"judge": {"true": 1.0}})


def test_weights_at_which_a_witness_has_begun_to_fall_are_none_to_go_back_to() -> None:
    first, later = held_out(0, total=0.2, true=1.0), held_out(1, total=0.25, true=1.0)
    off = change(later["true"], first["true"])
    less = {**later, "true": [value - 0.9 * off.stderr + off.by for value in later["true"]]}
    later["true"] = [value - 1.5 * off.stderr + off.by for value in later["true"]]
    assert change(later["true"], first["true"]).sigmas == pytest.approx(1.5)
    calm = with_witness()
    assert not [*calm.evaluated(0, first), *calm.evaluated(10, less)]
    assert not calm.falling
    assert (calm.rollbacks, calm.brake) == (0, 1.0)
    sentinel = with_witness()
    assert not sentinel.evaluated(0, first)
    assert sentinel.sound
    assert not sentinel.evaluated(10, later)
    assert sentinel.falling
    assert not sentinel.sound
    assert not sentinel.doubts, "chance alone does that at one of fifteen evaluations"
    assert not sentinel.evaluated(20, first | {"total": later["total"]})
    assert sentinel.sound


def test_findings_are_acted_on_again_while_they_last_and_forgotten_by_going_back() -> None:
    """Patience 3 and a window of 20: told after 3, acted on after 6, 26, 46."""
    sentinel, found = watched(lambda number: {"ratio/clip_fraction": 0.9}, count=60)
    later = [(at, True, False) for at in (6, 26, 46)]
    assert [(f.iteration, f.act, f.new) for f in found] == [(3, False, True), *later]
    then, _ = watched(lambda number: {}, count=30)
    sentinel.rollbacks, sentinel.brake, sentinel.good = 1, 0.5, 30
    sentinel.go_back(json.loads(json.dumps(then.state_dict())))
    assert not sentinel.open
    assert (sentinel.rollbacks, sentinel.brake, sentinel.good) == (1, 0.5, 30)
    assert sentinel.recent == then.recent
    row = healthy_row(31, random.Random(9)) | {"ratio/clip_fraction": 0.9}
    assert [bool(sentinel.observe(31 + place, row)) for place in range(3)] == [False, False, True], "it is told again"


def test_going_back_ends_every_streak() -> None:
    """Also one that had begun when the checkpoint was written: weights of another step size have another future."""
    begun, _ = watched(lambda number: {"ratio/clip_fraction": 0.9 if number > 28 else 0.2}, count=30)
    assert begun.streaks["clipped_away"] == 2
    begun.go_back(json.loads(json.dumps(begun.state_dict())))
    assert not any(begun.streaks.values())
    assert not begun.observe(31, healthy_row(31, random.Random(9)) | {"ratio/clip_fraction": 0.9})


def test_findings_about_steps_leave_the_best_alone() -> None:
    """They may be there all through a run, and what clips score is as true as ever."""
    sentinel, found = watched(lambda number: {"ratio/first_log": 0.5, "ratio/clip_fraction": 0.9, "ratio/mean": 0.8})
    assert set(names(found)) == {"replay_differs", "clipped_away", "ratio_off"}
    assert not sentinel.doubts
    once, _ = watched(lambda number: {"reward/group_std": 52.0 if number == 60 else 0.003})
    assert not once.open
    assert once.doubts == ["spread_exploded"], "not only when it is told"


# ---- a run


def bursts(videos: torch.Tensor, prompts: list[str], fps: float) -> torch.Tensor:
    trainer_toys.CALLS["count"] += 1
    level = trainer_toys.bright(videos, prompts, fps)
    return level if trainer_toys.CALLS["count"] <= 7 else 1e4 * level * torch.linspace(0.1, 1.0, len(level))


def test_the_best_weights_are_never_those_of_an_evaluation_in_doubt(make_config, monkeypatch, capsys) -> None:
    trainer_toys.CALLS["count"] = 0
    history, evaluate = {}, Trainer.evaluate

    def noted(self: Trainer, *arguments) -> Evaluation:
        history[self.state.iteration] = weights_of(self)
        result = evaluate(self, *arguments)
        result.metrics["eval/total"] = 1e6 + self.state.iteration  # each would be the best
        return result

    monkeypatch.setattr(Trainer, "evaluate", noted)
    config = make_config(
        iterations=6,  # with evaluations before the first and after every third, so the last rollout is the eighth call
        rollout={"steps": 2},
        update=UpdateConfig(updates_per_rollout=1),
        rewards=[RewardSpec(name=f"{__name__}:bursts", batch_size=0, try_out=False)],
        evaluate=EvalConfig(every=3, prompts=2, steps=1, show=0),
        keep=KeepConfig(checkpoint_every=6, videos_every=0),
    )
    train(config)
    assert list(history) == [0, 3, 6]
    (doubted,) = (event for event in read_events(Path(config.out)) if event["kind"] == "best")
    assert doubted["iteration"] == 6
    assert "spread_exploded" in doubted["text"]
    assert "best/ is not taken" in capsys.readouterr().out
    assert same(load_file(Path(config.out) / "best" / "toy.safetensors"), history[3])
    state = json.loads((Path(config.out) / "checkpoints" / "000006" / "state.json").read_text())
    assert state["best"]["iteration"] == 3
