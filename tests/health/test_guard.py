"""Verdicts of the sentinel and what a run does about them, at hand-made figures: each limit from both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import World
from sage_grpo.health.checks import LEAST
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import (
    AGREEMENT,
    STDERR,
    Agreement,
    RewardParts,
    ScoreChange,
    agreement_of,
    change,
    evidence,
    shortfall,
)
from sage_grpo.health.sentinel import Finding, PastEvaluation, Sentinel
from sage_grpo.health.statistics import MOST, ParameterDrift, agreements, correlation, thumbnails
from sage_grpo.training.guard import HealthGuard

FOUND = [Finding("a", 7, "old", True, False), Finding("b", 7, "fresh", False), Finding("c", 7, "both", True)]
ROOT = Path("checkpoints")


def guarded(
    action: str = "warn", *, evaluates: tuple[int, tuple[int, ...]] = (5, ()), held_out: bool = True, **state: Any
) -> tuple[HealthGuard, list[tuple[Any, ...]]]:
    done: list[tuple[Any, ...]] = []
    known = {"good": 4, "rollbacks": 0, "brake": 1.0, "sound": True, "iteration": 7, "evaluated": 7} | state
    iteration, evaluated = known.pop("iteration"), known.pop("evaluated")
    sentinel = SimpleNamespace(
        open=["a", "b"],
        observe=lambda at, row: done.append(("row", at, row)) or FOUND,
        evaluated=lambda at, scores, each: done.append(("evaluation", at, scores, each)) or [],
        **known,
    )
    optimizer = SimpleNamespace(
        pace=SimpleNamespace(slow_to=lambda brake: done.append(("slow", brake))),
        materialize=lambda: done.append(("materialize",)),
    )
    run = SimpleNamespace(
        iteration=iteration, evaluated=evaluated, sentinel=sentinel, optimizer=optimizer,
        go_back=lambda folder, world: done.append(("back", folder)),
    )  # fmt: skip
    config = SimpleNamespace(
        sentinel=SentinelConfig(action=action, lr_factor=0.25, rollbacks=2),
        evaluate=SimpleNamespace(every=evaluates[0], early=evaluates[1], per_prompt=3),
    )
    tell = lambda event: done.append((event.iteration, event.name, event.text, event.action))  # noqa: E731
    return HealthGuard(config, run, World(), ROOT, held_out, tell), done  # type: ignore[arg-type]


def test_an_evaluation_is_seen_score_by_score_and_off_says_nothing() -> None:
    guard, done = guarded("off")
    assert guard.see_evaluation([{"scores": {"total": 1.0, "a": 2.0}}, {"scores": {"total": 3.0, "a": None}}]) == {}
    assert done == [("evaluation", 7, {"total": [1.0, 3.0], "a": [2.0, None]}, 3)]
    assert guard.see_evaluation([]) == {}
    assert len(done) == 1


@pytest.mark.parametrize(
    ("state", "fault", "went", "end"),
    [
        ({}, None, True, ""),
        ({"rollbacks": 1, "brake": 0.5}, None, True, ""),
        ({"rollbacks": 2}, None, True, "It rolled back 2 times before (sentinel.rollbacks), and shorter steps did not help."),
        ({"good": None}, None, False, "There is no good checkpoint to roll back to."),
        ({}, "torn", False, f"The good checkpoint {ROOT / '000004'} cannot be used: torn."),
    ],
)  # fmt: skip
def test_a_run_goes_back_to_its_good_checkpoint_or_stops(state, fault, went, end, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "find_fault", lambda folder: fault if folder == ROOT / "000004" else "another")
    guard, done = guarded("rollback", **state)
    guard._found = [Finding("a", 7, "old", True, False)]
    assert guard.act() is went
    often, brake = state.get("rollbacks", 0), state.get("brake", 1.0)
    again = 0 if end else 1
    steps = f"with steps {brake * 0.25**again:g} times as long."
    told = f"a: rolled back to the weights of iteration 4 ({ROOT / '000004'}), {steps}"
    wanted = [*([("back", ROOT / "000004"), (7, "a", told, "rollback")] if went else [])]
    assert done == wanted + ([(7, "a", f"a: the run stops. {end}", "stop")] if end else [])
    assert guard.stops == bool(end)
    assert (guard.state.sentinel.rollbacks, guard.state.sentinel.brake) == (often + again, brake * 0.25**again)


def test_shorter_steps_are_told_and_have_an_end() -> None:
    for brake, left in ((1.0, 0.25), (LEAST, LEAST)):
        guard, done = guarded("lower_lr", brake=brake)
        guard._found = [Finding("a", 7, "old", True, False)]
        assert not guard.act()
        assert done == [("slow", left), (7, "a", f"a: steps are {left:g} times as long from now on.", "lower_lr")]


@pytest.mark.parametrize(
    ("given", "saving", "saved", "good"),
    [
        ({}, False, True, 7),
        ({"iteration": 0, "evaluated": 0}, False, True, 0),
        ({"evaluated": 6}, True, True, 4),  # saved anyway, but nobody knows how good
        ({"evaluated": 6}, False, False, 4),
        ({"sound": False}, False, False, 4),
        ({"good": 7}, False, False, 7),
        ({"evaluates": (0, ())}, False, False, 4),  # where nothing is evaluated: what is saved anyway
        ({"evaluates": (0, ()), "evaluated": 6}, True, True, 7),
        ({"evaluates": (0, (1,)), "evaluated": 6}, True, True, 4),
        ({"evaluates": (0, (1,))}, False, True, 7),
        ({"held_out": False, "evaluated": 6}, True, True, 7),
        ({"held_out": False}, False, False, 4),
        ({"action": "stop"}, False, False, 4),
    ],
)
def test_weights_are_good_that_were_just_evaluated_and_are_not_in_doubt(given, saving, saved, good) -> None:
    guard, done = guarded(**{"action": "rollback", **given})
    assert guard.mark(saving=saving) is saved
    assert guard.state.sentinel.good == good
    assert done == ([("materialize",)] if given.get("iteration") == 0 else [])


# ---- evidence


def off(by: float, stderr: float, at: Sequence[float] = (0.0,) * 4) -> list[float]:
    """Scores of four clips whose mean is `by` above those before, with this standard error."""
    return [value + by + sign * math.sqrt(3) * stderr for value, sign in zip(at, (1, -1, 1, -1))]


def test_a_change_is_a_mean_with_its_standard_error_and_has_a_sign() -> None:
    up, down = change([0.0] * 4, off(0.5, 0.1)), change(off(0.5, 0.1), [0.0] * 4)
    assert (up.by, up.stderr, up.sigmas) == pytest.approx((0.5, 0.1, 5.0))
    assert (down.by, down.stderr, down.sigmas) == pytest.approx((-0.5, 0.1, -5.0))
    assert [one.surely(limit) for one in (up, down) for limit in (4.9, 5.1)] == [True, False, False, False]
    assert [ScoreChange(by, 0.0).sigmas for by in (1.0, -1.0, 0.0)] == [math.inf, -math.inf, 0.0]
    assert (change([None], [1.0]), change([1.0], [3.0])) == (ScoreChange(0.0, math.inf), ScoreChange(2.0, math.inf))


def test_agreements_add_up_and_are_taken_away() -> None:
    one, other = (agreement_of({AGREEMENT + "j": mean, STDERR + "j": 0.3}, "j") for mean in (0.5, 0.1))
    for unknown in ({AGREEMENT + "j": 0.9}, {STDERR + "j": 0.9}, {}):
        assert agreement_of(unknown, "j") == Agreement()
    both = one.plus(other)
    assert both == (2, pytest.approx(0.6), pytest.approx(0.18))
    assert (both.mean, both.stderr) == pytest.approx((0.3, math.sqrt(0.18) / 2))
    rest = both.plus(one, -1)
    assert rest == (1, pytest.approx(0.1), pytest.approx(0.09))
    assert one.plus(rest) == pytest.approx(both)
    drop = one.to(rest)
    assert (drop.by, drop.stderr) == pytest.approx((0.4, math.hypot(0.3, 0.3)))
    assert one.to(Agreement()) is Agreement().to(one) is None
    assert (Agreement().mean, Agreement(1, 0.0, -1e-9).stderr) == (0.0, 0.0)
    assert evidence(ScoreChange(3.0, 1.0), None) == 3.0
    assert evidence(ScoreChange(3.0, 1.0), ScoreChange(2.0, 2.0)) == pytest.approx(4.0 / math.sqrt(2))


def test_a_shortfall_needs_two_clips_and_a_first_rise() -> None:
    total, judge = ([0.0, 0.0], [1.0, 1.0], [2.0, 3.0]), ([0.0, 0.0], [2.0, 2.0], [3.0, 3.0])
    found = shortfall(total, judge)
    assert (found.by, found.stderr) == pytest.approx((2.0, 1.0))  # rate 2: gains of 2 and 4 were due, and there was 1
    fewer = [[column[:1] for column in columns] for columns in (total, judge)]
    assert shortfall(*fewer) == ScoreChange(0.0, math.inf)
    assert shortfall(([1.0, 1.0], [0.0, 0.0], [2.0, 3.0]), judge) == ScoreChange(0.0, math.inf)
    assert shortfall(([0.0, 0.0], [0.0, 0.0], [2.0, 3.0]), judge).stderr == math.inf, "no rise, no rate"
    unscored = [[None, *column] for column in total], [[9.0, *column] for column in judge]
    assert shortfall(*unscored).by == pytest.approx(2.0)


def test_rank_correlations_and_their_mean() -> None:
    three = torch.tensor([1.0, 2.0, 3.0])
    assert correlation(three, torch.tensor([1.0, 3.0, 2.0])) == (0.5, 0.5)
    assert correlation(torch.tensor([1.0, 2.0, 3.0, math.nan]), torch.tensor([3.0, 2.0, 1.0, 9.0])) == (-1.0, 0.5)
    assert correlation(three, torch.zeros(3)) is None
    ranks, chance = three.double(), math.sqrt(0.5 / 2)
    for judge, mean, stderr in (([1.0, 2.0, 3.0, 3.0, 2.0, 1.0], 1.0, chance), ([1.0, 2.0, 3.0] * 2, 0.0, 1.0)):
        groups = torch.tensor([0] * 3 + [1] * 3)
        parts = {"true": torch.tensor(judge)}
        metrics = agreements(torch.cat([ranks, ranks.flip(0)]), parts, groups, {"j": {"true": 1.0}})
        assert metrics == {AGREEMENT + "j": mean, STDERR + "j": pytest.approx(stderr)}, "not less than chance has"
    values, groups = torch.cat([ranks] * 3), torch.tensor([0, 1, 2]).repeat_interleave(3)
    parts = {"true": torch.cat([ranks, ranks.flip(0), ranks.flip(0)])}
    found = agreements(values, parts, groups, {"j": {"true": 1.0}})
    assert found[STDERR + "j"] == pytest.approx(math.sqrt((16 + 4 + 4) / 9 / 2 / 3)), (
        "that of three correlations 1, -1, -1"
    )


def test_every_so_many_th_weight_is_watched_and_no_clip_is_no_error() -> None:
    for count, stride in ((MOST, 1), (MOST + 1, 2), (1 << 19, 2), ((1 << 19) + 1, 3)):
        assert ParameterDrift({"p": torch.nn.Parameter(torch.zeros(count))}).stride == stride
    assert ParameterDrift({}).measure(World()) == {"weights/distance": 0.0, "weights/moved": 0.0}
    assert thumbnails(torch.zeros((0, 3, 8, 8, 3), dtype=torch.uint8)).shape == (0, 4, 3, 8, 8)


# ---- verdicts about held-out scores, at their limits: two standard errors, a fifth of the gain


def watching(**known: list[float]) -> Sentinel:
    sentinel = Sentinel(SentinelConfig(), witnesses={"judge": {"true": 1.0}})
    sentinel.held_out = {"total": known, "judge": known}
    return sentinel


FLAT = [0.0] * 4


@pytest.mark.parametrize(
    ("lost", "stderr", "gain", "told"),
    [(0.21, 0.1, 1.0, True), (0.19, 0.05, 1.0, False), (0.39, 0.05, 2.0, False), (0.21, 0.11, 1.0, False), (0.21, 0.1, -9.0, True), (0.05, 0.01, 0.2, True), (-0.5, 0.1, 1.0, False)],
)  # fmt: skip
def test_a_total_fell_by_a_fifth_of_its_gain_and_surely(lost: float, stderr: float, gain: float, told: bool) -> None:
    sentinel = watching(first=[-gain] * 4, best=FLAT, then=FLAT)
    assert bool(sentinel._fell(off(-lost, stderr))) == told
    assert Sentinel(SentinelConfig())._fell(FLAT) == ""


@pytest.mark.parametrize(
    ("lost", "stderr", "gain", "rise", "hacked", "fell"),
    [
        # three standard errors are sure; a tenth of the gain where the total rises, a fifth where it stands
        (0.31, 0.1, 1.0, 1.0, True, False), (0.31, 0.1, 1.0, 0.0, False, True), (0.31, 0.1, 1.0, -1.0, False, True),
        (0.29, 0.1, 1.0, 1.0, False, False), (0.29, 0.1, 1.0, 0.0, False, False), (0.11, 0.01, 1.0, 1.0, True, False),
        (0.09, 0.01, 1.0, 1.0, False, False), (0.19, 0.01, 1.0, 0.0, False, False), (0.21, 0.01, 1.0, 0.0, False, True),
        (-0.5, 0.01, 1.0, 1.0, False, False), (-0.5, 0.01, 1.0, 0.0, False, False), (0.31, 0.1, -9.0, 0.0, False, True),
        (0.39, 0.01, 2.0, 0.0, False, False), (0.41, 0.01, 2.0, 0.0, False, True), (0.19, 0.01, 2.0, 1.0, False, False),
    ],
)  # fmt: skip
def test_a_witness_that_falls_is_hacking_where_the_total_rises_and_a_loss_where_it_stands(
    lost: float, stderr: float, gain: float, rise: float, hacked: bool, fell: bool
) -> None:
    sentinel, now, total = watching(first=[-gain] * 4, best=FLAT, then=FLAT), off(-lost, stderr), off(rise, 0.1)
    assert sentinel._witness_lost("judge", now, total)[0] == "hacking" * hacked + "witness_fell" * fell
    assert sentinel._witness_lost("nobody", now, total) == ("", "")


@pytest.mark.parametrize(("drop", "told"), [(0.5, True), (0.01, False), (-0.5, False)])
def test_groups_that_no_longer_agree_are_evidence_of_hacking(drop: float, told: bool) -> None:
    """Two and a half standard errors of held-out clips are too few alone, and with five of training's groups enough."""
    sentinel, total = watching(first=FLAT, best=FLAT, then=FLAT), off(1.0, 0.1)
    assert sentinel._witness_lost("judge", off(-0.25, 0.1), total) == ("", "")
    sentinel.at_best = {"judge": Agreement(10, 5.0, 0.25)}
    sentinel.agreement = {"judge": Agreement(20, 10.0 - 10 * drop, 0.75)}
    assert sentinel._witness_lost("judge", off(-0.25, 0.1), total)[0] == "hacking" * told
    assert not sentinel._witness_lost("judge", off(-0.09, 0.1), total)[0], "held-out clips must say half as much"


@pytest.mark.parametrize(
    ("gain", "later", "rise", "told"),
    [(1.0, 0.0, 1.0, True), (1.0, 0.08, 1.0, True), (1.0, 0.12, 1.0, False), (1.0, -1.0, 1.0, True), (1.0, 1.0, 1.0, False), (0.09, -1.0, 1.0, False), (1.0, 0.0, 0.3, False), (1.0, 0.0, -1.0, False)],
)  # fmt: skip
def test_a_witness_no_longer_follows_where_its_first_gain_was_sure_and_its_second_is_not(
    gain, later, rise, told
) -> None:
    sentinel, one, judge = watching(), off(1.0, 0.01), off(gain, 0.1)
    sentinel.remembered = [
        PastEvaluation({"total": FLAT, "judge": FLAT}),
        PastEvaluation({"total": one, "judge": judge}),
    ]
    assert bool(sentinel._decoupled("judge", off(later, 0.1, judge), off(rise, 0.1, one))) == told
    if told:
        sentinel.remembered[1] = PastEvaluation({"total": one, "judge": judge}, {"judge": Agreement(10, 5.0, 0.1)})
        for agreed, parted in ((10.0, False), (9.65, False), (9.5, True)):  # the drop's standard error is 0.45 here
            sentinel.agreement = {"judge": Agreement(20, agreed, 0.2)}
            assert bool(sentinel._decoupled("judge", off(later, 0.1, judge), off(rise, 0.1, one))) == parted
        first, half = PastEvaluation({"total": FLAT, "judge": FLAT}), sentinel.remembered[1]
        for places in ((off(0.1, 0.01), half), (half, off(1.9, 0.01))):  # the half is that with the total in the middle
            others = [
                one if one is half else PastEvaluation({"total": one, "judge": off(later, 0.1, judge)})
                for one in places
            ]
            sentinel.remembered, sentinel.agreement = [first, *others], {}
            text = sentinel._decoupled("judge", off(later, 0.1, judge), off(2.0, 0.1, FLAT))
            assert f"judge, which nothing is trained on, rose by {gain:.3g} " in text
        sentinel.remembered = sentinel.remembered[:1]
        assert not sentinel._decoupled("judge", off(later, 0.1, judge), off(rise, 0.1, one))


def test_a_part_is_below_its_best_by_five_standard_errors_to_the_side_that_is_worse() -> None:
    """Windows of five; a deviation of 1 in each gives each mean a squared standard error of 1/5."""
    for weight in (1.0, -2.0):
        for lost, told in ((3.2, True), (3.1, False), (-9.0, False)):
            parts = RewardParts({"a": weight, "b": 1.0}, 5)
            side, best = math.copysign(1.0, weight), [-1.0, 1.0, -1.0, 1.0, 0.0]
            rows = [{"reward/a": side * value, "reward/b": 0.0} for value in (*best, *(value - lost for value in best))]
            assert not any(parts.observe(rows[:number]) for number in range(1, 6))
            assert parts.best["reward/a"] == (pytest.approx(0.0), pytest.approx(0.2))
            assert bool(parts.observe(rows)) == told
