"""Composition: weights, names, masks, batches, placement; and users' functions."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.types import Reward

FPS = 8.0


LEVELS = torch.arange(5).float() * 10 + 5
PROMPTS = ["one", "two", "three", "four", "five"]


def test_the_total_is_the_weighted_sum_of_the_parts():
    composite = CompositeReward(
        [
            toy("two_parts", weights={"level": 2.0, "rate": -1.0}),
            toy("as_list", options={"offset": 0.5}, weights={"length": 3.0}),
            toy("mean_level", metric_only=True),
        ]
    )
    scores = composite.score(clips(), PROMPTS, FPS)[0]
    lengths = torch.tensor([3.0, 3, 5, 4, 4]) + 0.5
    torch.testing.assert_close(scores.total, 2 * LEVELS - FPS + 3 * lengths)
    assert set(scores.parts) == set(composite.names) == {"level", "rate", "length", "mean_level"}
    assert composite.weights == {"level": 2.0, "rate": -1.0, "length": 3.0}
    assert scores.valid.all()
    assert scores.total.dtype == torch.float32
    assert set(composite.seconds) == {"two_parts", "as_list", "mean_level"}


def test_shared_part_names_carry_the_reward():
    specs = [toy("two_parts", weights={"level": 1.0}, label="a"), toy("two_parts", weights={"level": 1.0, "rate": 0.0})]
    composite = CompositeReward(specs)
    assert composite.names == ("a/level", "two_parts/level", "rate")
    with pytest.raises(RewardConfigError, match="label"):
        CompositeReward([toy("mean_level"), toy("mean_level")])


def test_standardize_is_applied_to_parts_and_total():
    scores = CompositeReward([toy("mean_level", standardize={"mean_level": [10.0, 4.0]})]).score(clips(), PROMPTS, FPS)[
        0
    ]
    torch.testing.assert_close(scores.total, (LEVELS - 10) / 4)
    with pytest.raises(RewardConfigError, match="std"):
        CompositeReward([toy("mean_level", standardize={"mean_level": [0.0, 0.0]})])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8])
def test_scores_do_not_depend_on_the_batch_size(size):
    toy_rewards.CALLS.clear()
    scores = CompositeReward([toy("mean_level", batch_size=size)]).score(clips(), PROMPTS, FPS)[0]
    torch.testing.assert_close(scores.total, LEVELS)
    assert sum(toy_rewards.CALLS) == 5
    assert max(toy_rewards.CALLS) == min(size or 5, 5)


def test_the_reward_of_a_clip_belongs_to_its_own_prompt_in_every_batch():
    prompts = ["a", "bb", "ccc", "dddd", "eeeee"]
    scores = CompositeReward([toy("as_list", batch_size=2)]).score(clips(), prompts, FPS)[0]
    assert scores.total.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    toy_rewards.CALLS.clear()
    scores = CompositeReward([toy("out_of_memory_above_two", batch_size=5)]).score(clips(), PROMPTS, FPS)[0]
    torch.testing.assert_close(scores.total, LEVELS)
    assert toy_rewards.CALLS == [2, 2, 1]


@pytest.mark.parametrize(("name", "reason"), [("raises_on_bad", "KeyError"), ("nan_on_bad", "nan")])
def test_only_the_clip_that_fails_is_masked_and_counted(name, reason):
    composite = CompositeReward([toy(name), toy("as_list")])
    scores, report = composite.score(clips(), ["a", "bad", "c", "d", "e"], FPS)
    assert scores.valid.tolist() == [True, False, True, True, True]
    assert scores.total[1].isnan()
    torch.testing.assert_close(scores.total[[0, 2, 3, 4]], LEVELS[[0, 2, 3, 4]] + 1)
    assert (report.failed, report.total, report.counts()) == (1, 5, {name: 1})
    failure = report.failures[0]
    assert (failure.reward, failure.index, failure.prompt) == (name, 1, "bad")
    assert reason in failure.reason


def test_infinity_is_a_failure_too():
    scores, report = CompositeReward([toy("nan_on_bad")]).score(clips(2), ["a", "bad inf"], FPS)
    assert scores.valid.tolist() == [True, False]
    assert scores.parts["nan_on_bad"][1].isnan()
    assert report.failed == 1


@pytest.mark.parametrize("name", ["too_few", "wrong_shape", "words", "nothing"])
def test_a_wrong_return_masks_every_clip_with_names_and_prompts(name):
    scores, report = CompositeReward([toy(name)]).score(clips(), PROMPTS, FPS)
    assert not scores.valid.any()
    assert report.failed == 5
    assert name in report.failures[0].describe()
    assert "'three'" in report.failures[2].describe()


def test_a_failing_metric_does_not_invalidate_the_clip():
    composite = CompositeReward([toy("as_list"), toy("too_few", metric_only=True)], max_failed_fraction=0.0)
    scores = composite.score(clips(), PROMPTS, FPS)[0]
    assert scores.valid.all()
    assert scores.parts["too_few"].isnan().all()


def test_a_metric_that_gives_up_on_a_clip_is_reported_too():
    composite = CompositeReward([toy("as_list"), toy("nan_on_bad", metric_only=True)])
    scores, report = composite.score(clips(2), ["a", "bad"], FPS)
    assert scores.valid.all()
    assert (report.failed, report.counts()) == (0, {"nan_on_bad": 1})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardSpec(name="video_aling"), "Did you mean 'videoalign'"),
        (RewardSpec(name="video_stats", weights={"sharpnes": 1.0}), "Did you mean 'sharpness'"),
        (RewardSpec(name="video_stats", options={"part": ["motion"]}), "Did you mean 'parts'"),
        (toy("mean_levl"), "Did you mean 'mean_level'"),
        (toy("as_list", options={"ofset": 1.0}), "ofset"),
        (RewardSpec(name="no_such_module:f"), "no_such_module"),
        (RewardSpec(name="toy_rewards:CALLS"), "neither a function nor a class"),
        (RewardSpec(name="toy_rewards:NoReward"), "names"),
        (RewardSpec(name="toy_rewards:Movable", weights={"move": 1.0}), "Did you mean 'moved'"),
        (RewardSpec(name="video_stats"), "give the weights"),
        (RewardSpec(name="clip"), "needs the option 'model'"),
    ],
)
def test_wrong_configurations_name_the_remedy(spec, message):
    with pytest.raises(ValueError, match=message):
        CompositeReward([spec])


def test_a_misspelt_part_of_a_function_stops_the_run_with_the_nearest_name():
    composite = CompositeReward([toy("two_parts", weights={"levle": 1.0})])
    with pytest.raises(RewardConfigError, match="Did you mean 'level'"):
        composite.score(clips(), PROMPTS, FPS)


def test_frames_only_functions_see_frames_sampled_by_time():
    videos = torch.zeros(2, 24, 4, 4, 3, dtype=torch.uint8)
    videos[0, :, :, :, 0] = torch.arange(24, dtype=torch.uint8).view(24, 1, 1)
    composite = CompositeReward([toy("red_frames", options={"per_frame": True, "sample_fps": 2.0})])
    # three seconds at 8 fps read at .25, .75, ...: frames 2, 6, 10, ...
    assert composite.score(videos, ["a", "b"], 8.0)[0].total.tolist() == [12.0, 0.0]
    limited = CompositeReward([toy("red_frames", options={"per_frame": True, "num_frames": 1})])
    assert limited.score(videos, ["a", "b"], 8.0)[0].total.tolist() == [12.0, 0.0]


def test_rewards_with_weights_move_there_and_back():
    composite = CompositeReward([RewardSpec(name="toy_rewards:Movable", options={"gain": 2.0})], device="meta")
    places = composite._members[0].reward.places
    composite.onload()
    composite.offload()
    assert places == ["meta", "cpu"]
    between = CompositeReward([RewardSpec(name="toy_rewards:Movable")], offload_between=True)
    assert between.score(clips(), PROMPTS, FPS)[0].total.tolist() == LEVELS.tolist()
    assert between._members[0].reward.places == ["cpu", "cpu"]


def test_loaded_rewards_keep_the_protocol():
    for spec in (toy("mean_level"), RewardSpec(name="video_stats"), RewardSpec(name="toy_rewards:Movable")):
        reward = load_reward(spec)
        assert isinstance(reward, Reward)
        assert set(reward(clips(), PROMPTS, FPS)) == set(reward.names)


@pytest.mark.slow
def test_specs_import_without_the_heavy_libraries():
    code = (
        "import sys, sage_grpo.rewards.base, sage_grpo.commands.serve_reward\n"
        "heavy = {'transformers', 'diffusers', 'peft', 'uvicorn', 'starlette', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
