"""Rewards that compare the clips of a group: whole groups in every call."""

from __future__ import annotations

import pytest
import torch
import toy_rewards

from sage_grpo.data.groups import deal
from sage_grpo.distributed.spec import Layout
from sage_grpo.distributed.world import World
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.evaluate import check_evaluation
from sage_grpo.training.scoring import check_groups

FPS = 8.0


def clips(levels: list[int]) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1, 1).expand(-1, 4, 6, 6, 3).contiguous()


def reward(name: str, takes: str, **options: object) -> CompositeReward:
    return CompositeReward([RewardSpec(name=f"toy_rewards:{name}", options={"takes": takes, **options})])


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
        ({"options": {"takes": "pairs"}}, "a whole group, not 'pairs'"),
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


def test_a_clip_alone_is_not_scored():
    scores, report = reward("ranked", "group").score(clips([10, 20, 30]), ["a", "b", "a"], FPS)
    assert scores.valid.tolist() == [True, False, True]
    assert "two clips" in report.failures[0].reason
