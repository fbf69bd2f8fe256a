"""Composition: weights, names, masks, batches, placement, gradients; users' functions, and objects that a program hands over."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import BUILT_IN, RewardSpec, facts_of, gather_rewards, load_reward, own_reward
from sage_grpo.utils.imports import ObjectNeeded

FPS = 8.0


LEVELS = torch.arange(5).float() * 10 + 5
PROMPTS = ["one", "two", "three", "four", "five"]


def test_sizes_of_built_in_rewards() -> None:
    """Millions of parameters and MB of files, from which plans and the doctor count; four bytes each, or two where they are bfloat16."""
    sizes = {
        "videoalign": (2200, 4400), "clip": (430, 1700), "pickscore": (990, 3900), "aesthetic": (430, 1700), "hpsv2": (990, 3900),
        "hpsv3": (7700, 15500), "clap": (150, 600),
    }  # fmt: skip
    known = {name: facts for name in BUILT_IN if (facts := facts_of(name)) and facts.parameters}
    found = {name: (round(one.parameters / 1e6), round(one.gigabytes * 1e3)) for name, one in known.items()}
    assert found == sizes


def test_the_total_is_the_weighted_sum_of_the_parts():
    lengths = toy("as_list", options={"offset": 0.5}, weights={"length": 3.0})
    parts = toy("two_parts", weights={"level": 2.0, "rate": -1.0})
    composite = CompositeReward([parts, lengths, toy("mean_level", metric_only=True)])
    scores = composite.score(clips(), PROMPTS, FPS)[0]
    lengths = torch.tensor([3.0, 3, 5, 4, 4]) + 0.5
    torch.testing.assert_close(scores.total, 2 * LEVELS - FPS + 3 * lengths)
    assert set(scores.parts) == set(composite.names) == {"level", "rate", "length", "mean_level"}
    assert composite.weights == {"level": 2.0, "rate": -1.0, "length": 3.0}
    assert composite.watching == {"mean_level": {"mean_level": 1.0}}
    assert scores.valid.all()
    assert scores.total.dtype == torch.float32


def test_shared_part_names_carry_the_reward():
    specs = [toy("two_parts", weights={"level": 1.0}, label="a"), toy("two_parts", weights={"level": 1.0, "rate": 0.0})]
    composite = CompositeReward(specs)
    assert [one.counts for one in (*specs, toy("two_parts", weights={"level": 0.0}))] == [True, True, False]
    assert composite.max_failed_fraction == 0.25
    assert composite.names == ("a/level", "two_parts/level", "rate")
    watched = toy("two_parts", weights={"level": 2.0}, label="c", metric_only=True, judges="audio")
    composite = CompositeReward([dataclasses.replace(specs[0], judges="audio"), specs[1], watched])
    assert composite.weights == {"a/level": 1.0, "two_parts/level": 1.0}
    assert composite.watching == {"c": {"c/level": 2.0}}
    assert composite.counting(part="audio") == composite.weights
    assert composite.counting(part="video") == {"two_parts/level": 1.0}
    with pytest.raises(RewardConfigError, match="give the weights of those that count"):
        CompositeReward([toy("two_parts", options={"parts": ["level", "rate"]})])
    with pytest.raises(RewardConfigError, match="label"):
        CompositeReward([toy("mean_level"), toy("mean_level")])


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    toy_rewards.CALLS.clear()
    scores = CompositeReward([toy("out_of_memory_above_two", batch_size=5)]).score(clips(), PROMPTS, FPS)[0]
    torch.testing.assert_close(scores.total, LEVELS)
    assert toy_rewards.CALLS == [2, 2, 1]


@pytest.mark.parametrize("size", [0, 2, 8])
def test_scores_do_not_depend_on_the_batch_size(size):
    toy_rewards.CALLS.clear()
    composite = CompositeReward([toy("mean_level", batch_size=size), toy("as_list", batch_size=size)])
    scores = composite.score(clips(), ["a", "bb", "ccc", "dddd", "eeeee"], FPS)[0]
    torch.testing.assert_close(scores.parts["mean_level"], LEVELS)
    assert scores.parts["as_list"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]  # each its own prompt's
    assert sum(toy_rewards.CALLS) == 5
    assert max(toy_rewards.CALLS) == min(size or 5, 5)


@pytest.mark.parametrize("metric_only", [False, True])
@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [("raises_on_bad", "bad", "TimeoutError"), ("nan_on_bad", "bad", "nan"), ("nan_on_bad", "bad inf", "inf")],
)
def test_only_the_clip_that_fails_is_masked_and_counted(name, bad, reason, metric_only):
    composite = CompositeReward([toy(name, metric_only=metric_only), toy("as_list")])
    scores, report = composite.score(clips(), ["a", bad, "c", "d", "e"], FPS)
    assert scores.valid.tolist() == [True, metric_only, True, True, True]
    assert scores.total[1].isnan().item() is not metric_only
    assert scores.parts[name].isnan().tolist() == [False, True, False, False, False], (
        "an infinite reward is one that is missing"
    )
    torch.testing.assert_close(scores.total[[0, 2, 3, 4]], LEVELS[[0, 2, 3, 4]] * (not metric_only) + 1)
    assert report.counts() == {name: 1}
    failure = report.failures[0]
    assert (failure.reward, failure.index, failure.prompt) == (name, 1, bad)
    assert reason in failure.reason


def test_a_clip_whose_total_or_gradient_is_not_finite_moves_nothing():
    """A root at 0 is a finite score with an infinite slope; times the 0 of a black clip that is NaN."""
    composite = CompositeReward([toy("root_of_level", options={"differentiable": True})])
    floats = torch.tensor([0.0, 4.0, -4.0]).view(3, 1, 1, 1, 1).expand(3, 2, 4, 4, 3)
    gradient = composite.gradient(floats, lambda one: one, "one", FPS)
    assert gradient.flatten(1).any(1).tolist() == [False, True, False]
    torch.testing.assert_close(gradient[1], torch.full((2, 4, 4, 3), 0.25 / 96))


def test_only_what_counts_is_differentiated_and_its_weights_add_up():
    level = {"weights": {"level": 1.0, "half": 0.0}, "options": {"differentiable": True}}
    composite = CompositeReward(
        [toy("two_levels", **level), toy("two_levels", label="b", **level), toy("as_list", metric_only=True)]
    )
    floats = clips(2).float()
    gradient = composite.gradient(floats, lambda one: 3 * one, "one", FPS)
    torch.testing.assert_close(gradient, torch.full_like(floats, 2 * 3 / floats[0].numel()))


def nothing(videos, prompts, fps):
    """Forgets to return."""


@pytest.mark.parametrize(
    "function",
    [
        nothing,
        lambda videos, prompts, fps: [1.0] * (len(prompts) - 1),
        lambda videos, prompts, fps: videos.float().mean(dim=(2, 3, 4)),
        lambda videos, prompts, fps: ["good"] * len(prompts),
    ],
)
def test_a_wrong_return_masks_every_clip_with_names_and_prompts(function):
    given = own_reward(function, label="mine")
    scores, report = CompositeReward([given.spec], objects={given.spec.name: given.reward}).score(clips(), PROMPTS, FPS)
    assert not scores.valid.any()
    assert "mine on 'three': part 'mine' " in report.failures[2].describe()


def total(rewards: Any) -> tuple[CompositeReward, list[float]]:
    specs, objects = gather_rewards(rewards)
    composite = CompositeReward(specs, objects=objects)
    return composite, composite.score(clips(), PROMPTS, FPS)[0].total.tolist()


def test_objects_lambdas_partials_and_options() -> None:
    moved = own_reward(toy_rewards.Movable(gain=2.0), weights={"moved": -1.0}, label="mine")
    composite, values = total([moved, toy_rewards.mean_level])
    assert composite.titles == ("mine", "mean_level")
    assert values == (-LEVELS).tolist()

    def scaled(videos, prompts, fps, by: float = 1.0):
        return by * toy_rewards.level_of(videos)

    assert total(lambda videos, prompts, fps: [1.0] * len(prompts))[0].names == ("reward",)
    assert total(functools.partial(scaled, by=3.0))[1] == (3 * LEVELS).tolist()
    assert total(own_reward(scaled, options={"by": 2.0}))[1] == (2 * LEVELS).tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gather_rewards([nothing, nothing]), "Two rewards are called 'nothing'.*label"),
        (lambda: gather_rewards([toy_rewards.Movable]), "Movable is a class: give an object of it"),
        (lambda: gather_rewards([3]), "A int is not a reward"),
        (lambda: own_reward(toy_rewards.Movable(), options={"gain": 2}), "Movable is an object"),
        (lambda: own_reward(functools.partial(nothing, None, None)), "cannot be called"),
        (lambda: load_reward(RewardSpec(name="clip")), "Reward 'clip' needs the option 'model'"),
        (lambda: load_reward(RewardSpec(name="object:nothing")), "got a reward as an object of a Python program"),
    ],
)
def test_what_is_no_reward_is_refused(make: Any, said: str) -> None:
    with pytest.raises((RewardConfigError, ObjectNeeded), match=said):
        make()
