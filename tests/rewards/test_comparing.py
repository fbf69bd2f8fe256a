"""Rewards that compare the clips of a group: whole groups in every call, and the laws of win rates."""

from __future__ import annotations

import pytest
import torch
import toy_rewards
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import completion, judge_server

from sage_grpo.data.groups import deal
from sage_grpo.distributed.spec import Layout
from sage_grpo.distributed.world import World
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.judge.vlm import VlmJudge
from sage_grpo.rewards.preference import ordered_pairs, win_rates
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.evaluate import check_evaluation
from sage_grpo.training.scoring import check_groups

FPS = 8.0


def clips(levels: list[int]) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1, 1).expand(-1, 4, 6, 6, 3).contiguous()


def reward(name: str, takes: str, **options: object) -> CompositeReward:
    return CompositeReward([RewardSpec(name=f"toy_rewards:{name}", options={"takes": takes, **options})])


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.permutations(range(3)))
def test_win_rates_do_not_depend_on_the_order_and_always_sum_to_half_of_the_clips(preferences, order):
    pairs, asked = ordered_pairs(3), torch.tensor(preferences)
    rates = win_rates(3, pairs, asked)
    assert float(rates.sum()) == pytest.approx(1.5)
    known = dict(zip(pairs, preferences))
    moved = torch.tensor([known[order[i], order[j]] for i, j in pairs])
    torch.testing.assert_close(win_rates(3, pairs, moved), rates[list(order)])


@pytest.mark.parametrize("bias", [0.0, 0.4])
def test_a_bias_for_the_first_clip_favours_nobody(bias):
    scores = reward("prefers", "pairs", bias=bias).score(clips([90, 10, 90, 200]), ["p"] * 4, FPS)[0].total
    assert scores[0] == scores[2]  # equal clips
    assert scores[1] < scores[0] < scores[3]
    assert float(scores.sum()) == pytest.approx(2.0)
    if bias == 0:  # by hand, for the darkest
        expected = torch.sigmoid(torch.tensor([-80.0, -80, -190]) / 20).mean()
        assert float(scores[1]) == pytest.approx(float(expected), rel=1e-4)


def test_pairs_are_asked_some_at_a_time_and_a_preference_is_a_probability():
    toy_rewards.CALLS.clear()
    few = reward("prefers", "pairs", pairs_per_call=4).score(clips([1, 50, 99]), ["p"] * 3, FPS)[0]
    assert toy_rewards.CALLS == [4, 2]
    assert torch.equal(few.total, reward("prefers", "pairs").score(clips([1, 50, 99]), ["p"] * 3, FPS)[0].total)
    _, report = reward("out_of_range", "pairs").score(clips([1, 2]), ["p"] * 2, FPS)
    assert "within 0" in report.failures[0].reason


def test_every_call_has_one_whole_group_however_the_clips_lie():
    toy_rewards.CALLS.clear()
    composite = reward("ranked", "group")
    prompts = ["a", "b", "a", "b", "a"]
    scores = composite.score(clips([10, 20, 30, 40, 20]), prompts, FPS)[0].total
    assert scores.tolist() == [0.0, 0.0, 1.0, 1.0, 0.5]
    assert toy_rewards.CALLS == [3, 2]
    # two groups of one prompt are not one
    scores = composite.score(clips([10, 20, 30, 40]), ["a"] * 4, FPS, groups=[0, 1, 0, 1])[0].total
    assert scores.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"options": {"takes": "group"}, "batch_size": 4}, "batch_size"),
        ({"options": {"takes": "group"}, "isolate_failures": True}, "isolate_failures"),
        ({"options": {"takes": "pairs"}}, "first, second, prompts, fps"),
        ({"options": {"takes": "group", "differentiable": True}}, "one by one"),
    ],
)
def test_what_does_not_go_with_comparing_is_refused(spec, why):
    with pytest.raises(RewardConfigError, match=why):
        CompositeReward([RewardSpec(name="toy_rewards:ranked", **spec)])


@pytest.mark.parametrize(("prompts", "ranks", "whole"), [(4, 2, True), (3, 2, False), (2, 4, False)])
def test_groups_that_are_spread_over_ranks_are_refused(prompts, ranks, whole):
    composite, plain = reward("ranked", "group"), CompositeReward([RewardSpec(name="toy_rewards:mean_level")])
    world = World(size=ranks, layout=Layout(replicate=ranks))
    shares = deal(prompts, 4, 1, world_size=ranks)
    check_groups(plain, shares, 4, "", world)
    if whole:
        check_groups(composite, shares, 4, "", world)
        check_evaluation(composite, prompts, EvalConfig(per_prompt=2), 1, world)
    else:
        with pytest.raises(RewardConfigError, match="multiple of them"):
            check_groups(composite, shares, 4, "Use a multiple of them.", world)
        with pytest.raises(RewardConfigError, match=f"{ranks} data-parallel ranks"):
            check_evaluation(composite, prompts, EvalConfig(per_prompt=2), 1, world)
    with pytest.raises(RewardConfigError, match="one clip a prompt"):
        check_evaluation(composite, prompts, EvalConfig(per_prompt=1), 1, world)
    with pytest.raises(RewardConfigError, match="sequence"):
        check_groups(composite, shares, 4, "", World(layout=Layout(sequence=2)))


def test_the_judge_compares_both_orders_and_its_love_of_the_first_is_taken_out():
    def answer(body, number):
        return completion({"look": {"reason": f"{number}", "score": 0.9}})

    with judge_server(answer) as server:
        judge = VlmJudge(
            url=server.url, model="m", dimensions={"look": "looks"}, takes="pairs", frames={"sample_fps": 4}
        )
        result = judge(clips([10, 90, 200]), ["x"] * 3, FPS)
    assert len(server.asked) == 6
    assert result["look"].tolist() == pytest.approx([0.5] * 3)
    text, *pictures = server.asked[0][1]["messages"][1]["content"]
    assert "2 of the first, then 2 of the second" in text["text"]
    assert pictures[0] == pictures[1] != pictures[2] == pictures[3]


def test_clips_and_pairs_that_were_not_judged_do_not_count():
    scores, _ = reward("prefers", "pairs").score(clips([0, 0, 100]), ["p"] * 3, FPS)
    assert scores.total.tolist() == pytest.approx([0.0067, 0.0067, 0.9933], abs=1e-4)  # their own pair counts nowhere
    scores, report = reward("prefers", "pairs").score(clips([0, 0]), ["p"] * 2, FPS)
    assert (report.failed, scores.valid.any().item()) == (2, False)
    scores, report = reward("ranked", "group").score(clips([10, 20, 30]), ["a", "b", "a"], FPS)
    assert scores.valid.tolist() == [True, False, True]
    assert "two clips" in report.failures[0].reason
