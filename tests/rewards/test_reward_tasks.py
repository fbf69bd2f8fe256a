"""Rewards that count for some clips only: of the prompts that name them, of some iterations, or above the floor of another part."""

from __future__ import annotations

import pytest
import torch
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import Gate, RewardSpec

LEVELS = torch.arange(5).float() * 10 + 5
PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]
LENGTHS = torch.arange(5).float() + 1
NAN = torch.nan
GATE = Gate(part="level", floor=20.0, below=-1.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_clip_is_judged_by_the_rewards_that_its_prompt_names(overlap: bool) -> None:
    """The others neither see it nor count as 0 for it, and cannot fail on it; what is only logged scores all."""
    toy_rewards.CALLS.clear()
    specs = [
        toy("nan_on_bad", label="level", weights={"nan_on_bad": 2.0}, overlap=overlap),
        toy("as_list", label="length", overlap=overlap),
        toy("as_list", label="seen", metric_only=True),
    ]
    composite = CompositeReward(specs)
    routes = [("level",), ("length",), (), ("level", "length"), ("length",)]
    prompts = ["a", "bad", "ccc", "bad!", "eeeee"]
    lengths = torch.tensor([1.0, 3.0, 3.0, 4.0, 5.0])
    scores, report = composite.score(clips(), prompts, 8.0, routes=routes)
    alone = 2 * LEVELS
    expected = torch.tensor([alone[0], lengths[1], alone[2] + lengths[2], NAN, lengths[4]])
    torch.testing.assert_close(scores.total, expected, equal_nan=True)
    seen = torch.tensor([5.0, NAN, 25.0, NAN, NAN])
    torch.testing.assert_close(scores.parts["nan_on_bad"], seen, equal_nan=True)
    torch.testing.assert_close(scores.parts["length/as_list"], torch.tensor([NAN, 3.0, 3.0, 4.0, 5.0]), equal_nan=True)
    torch.testing.assert_close(scores.parts["seen/as_list"], lengths)
    assert [(one.reward, one.index) for one in report.failures] == [("level", 3)]
    assert sum(toy_rewards.CALLS) == 3
    nobody = composite.score(clips(2), ["a", "b"], 8.0, routes=[("length",)] * 2)[0]
    assert nobody.parts["nan_on_bad"].isnan().all()
    assert nobody.total.tolist() == [1.0, 1.0]


def test_a_reward_is_tried_out_on_its_own_prompts() -> None:
    """It may read a column that the rows of another task do not have."""
    composite = CompositeReward([toy("worth"), toy("as_list")])
    rows = {"metadata": {}, "others": [("b", {"worth": 1})]}
    assert "KeyError" in composite.try_out("a", **rows)
    assert not composite.try_out("a", **rows, routes=[("as_list",), ("worth",)])
    assert "KeyError" in composite.try_out("a", **rows, routes=[("worth",), ("as_list",)])


def test_the_gradient_is_of_what_counts_at_an_iteration_for_the_prompt() -> None:
    level = {"weights": {"level": 1.0}, "options": {"differentiable": True}}
    composite = CompositeReward(
        [toy("two_levels", label="a", schedule=[[0, 0.0], [4, 1.0]], **level), toy("two_levels", label="b", **level)]
    )
    floats = clips(1).float()
    for route, iteration, factor in (((), 1, 1.25), (("a",), 1, 0.25), (("b",), 1, 1.0), (("a",), None, 1.0)):
        gradient = composite.gradient(floats, lambda one: one, "one", 8.0, None, route, iteration)
        torch.testing.assert_close(gradient, torch.full_like(floats, factor / floats[0].numel()))


def test_a_schedule_is_linear_between_its_points_and_constant_outside() -> None:
    spec = RewardSpec(name="clip", schedule=[[2, 0.0], [4, 1.0], [5, 3.0]])
    assert [spec.factor(number) for number in range(7)] == [0.0, 0.0, 0.0, 0.5, 1.0, 3.0, 3.0]
    assert spec.factor() == 3.0
    assert [RewardSpec(name="clip").factor(number) for number in (0, None)] == [1.0, 1.0]


def test_the_total_has_the_weights_of_the_iteration() -> None:
    """A reward whose factor is 0 is logged only: its failures cost no clip. Without an iteration the last factor counts."""
    specs = [toy("nan_on_bad", schedule=[[0, 1.0], [2, 0.0], [4, 0.5]]), toy("as_list")]
    composite = CompositeReward(specs)
    prompts = ["bad", *PROMPTS[1:]]
    lengths = torch.tensor([3.0, *LENGTHS[1:]])
    for number, factor in ((0, 1.0), (1, 0.5), (2, 0.0), (3, 0.25), (9, 0.5), (None, 0.5)):
        expected = lengths + factor * LEVELS
        expected[0] = NAN if factor else lengths[0]
        found = composite.score(clips(), prompts, 8.0, iteration=number)[0]
        torch.testing.assert_close(found.total, expected, equal_nan=True)
        assert composite.counting(number).get("nan_on_bad", 0.0) == factor
    assert composite.weights == {"nan_on_bad": 1.0, "as_list": 1.0}


def test_a_gate_takes_away_what_counts_below_its_floor() -> None:
    parts = toy("two_parts", weights={"level": 1.0, "rate": -2.0}, gate=GATE)
    composite = CompositeReward([parts, toy("as_list", gate=Gate(part="level", floor=25.0), weights={"as_list": 3.0})])
    scores = composite.score(clips(), PROMPTS, 8.0)[0]
    rate = torch.tensor([-1.0, -1.0, 8.0, 8.0, 8.0])
    torch.testing.assert_close(scores.total, LEVELS - 2 * rate + 3 * LENGTHS * (LEVELS >= 25))
    assert scores.parts["rate"].tolist() == [8.0] * 5, "logged as it was scored"
    only = toy("two_levels", weights={"level": 1.0, "half": 1.0}, gate=Gate(part="half", floor=9.0, only=["level"]))
    found = CompositeReward([only]).score(clips(), PROMPTS, 8.0)[0]
    torch.testing.assert_close(found.total, LEVELS / 2 + LEVELS * (LEVELS / 2 >= 9))


def test_a_clip_whose_gate_failed_is_masked() -> None:
    """It is neither above nor below the floor. The gate's reward scores the clip also where it does not count itself."""
    gate = Gate(part="nan_on_bad", floor=0.0)
    composite = CompositeReward([toy("as_list", gate=gate), toy("nan_on_bad")])
    scores = composite.score(clips(2), ["bad", "b"], 8.0, routes=[("as_list",)] * 2)[0]
    torch.testing.assert_close(scores.total, torch.tensor([NAN, 1.0]), equal_nan=True)


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (Gate(part="levels", floor=0.0), "compares a part that no reward has, 'levels'. Did you mean 'level'"),
        (Gate(part="level", floor=0.0, only=["level", "speed"]), "has no weight for the part 'speed'"),
    ],
)
def test_unknown_parts_of_a_gate_are_refused(gate: Gate, says: str) -> None:
    with pytest.raises(RewardConfigError, match=says):
        CompositeReward([toy("two_parts", weights={"level": 1.0, "rate": 1.0}, gate=gate)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": [[0, 1.0], [0, 2.0]]}, "rising whole iterations"),
        ({"schedule": [[0.5, 1.0]]}, "rising whole iterations"),
        ({"schedule": [[1.0]]}, "rising whole iterations"),
        ({"schedule": [[0, -1.0]]}, "must be at least 0"),
        ({"metric_only": True, "gate": GATE}, "metric_only, so that schedule and gate do nothing"),
    ],
)
def test_what_a_schedule_and_a_gate_cannot_be(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RewardSpec(name="clip", **options)
