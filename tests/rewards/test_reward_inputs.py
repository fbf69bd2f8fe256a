"""What a reward is handed: memory of its own, metadata, frames with weights, threads, an event loop, a device."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.frames import stretch
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError
from sage_grpo.rewards.spec import RewardSpec

FPS = 8.0
LEVELS = torch.arange(5).float() * 10 + 5
PROMPTS = ["one", "two three", "four", "five", "six"]


@pytest.mark.parametrize("size", [0, 2, 8])
def test_a_write_through_numpy_reaches_nobody_else(size):
    videos = clips()
    composite = CompositeReward([toy("through_numpy", batch_size=size), toy("mean_level"), toy("as_list")])
    scores = composite.score(videos, PROMPTS, FPS)[0]
    assert torch.equal(videos, clips())  # what is saved afterwards
    torch.testing.assert_close(scores.parts["mean_level"], LEVELS)
    torch.testing.assert_close(scores.parts["as_list"], torch.tensor([float(len(p)) for p in PROMPTS]))


def test_what_ships_with_the_package_gets_no_copy(monkeypatch):
    seen = []
    composite = CompositeReward([RewardSpec(name="video_stats", weights={"brightness": 1.0}), toy("mean_level")])
    for member in composite._members:
        reward = member.reward
        monkeypatch.setattr(member, "reward", Watched(reward, seen))
    videos = clips()
    composite.score(videos, PROMPTS, FPS)[0]
    own = videos.untyped_storage().data_ptr()
    assert [pointer == own for pointer in seen] == [True, False]


class Watched:
    """Notes where the clips lie."""

    def __init__(self, reward, seen) -> None:
        self.reward, self.seen, self.names = reward, seen, reward.names

    def __call__(self, videos, prompts, fps, **extra):
        self.seen.append(videos.untyped_storage().data_ptr())
        return self.reward(videos, prompts, fps, **extra)


@pytest.mark.parametrize("size", [0, 2])
def test_rewards_that_ask_for_metadata_get_each_clips_row(size):
    rows = [{"words": "1"}, {"words": "2", "image": "first.png"}, {"words": "9"}, {}, {"words": 1}]
    composite = CompositeReward(
        [toy("counts_words", batch_size=size), toy("TakesMetadata", batch_size=size), toy("mean_level")]
    )
    scores = composite.score(clips(), PROMPTS, FPS, rows)[0]
    assert scores.parts["counts_words"].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scores.parts["image"].tolist() == [
        0.0,
        1.0,
        0.0,
        0.0,
        0.0,
    ]  # the rows that the first reward emptied were its own
    assert rows[1] == {"words": "2", "image": "first.png"}
    without = composite.score(clips(), PROMPTS, FPS)[0]
    assert without.parts["counts_words"].tolist() == [0.0] * 5
    with pytest.raises(ValueError, match="One row of metadata a clip"):
        composite.score(clips(), PROMPTS, FPS, rows[:3])[0]


def test_functions_that_see_frames_get_the_row_of_their_clip():
    composite = CompositeReward([toy("image_of_frames", options={"per_frame": True, "sample_fps": 4.0})])
    scores = composite.score(clips(3), PROMPTS[:3], FPS, [{"number": n} for n in (3, 5, 8)])[0]
    assert scores.total.tolist() == [3.0, 5.0, 8.0]


def test_functions_that_see_frames_get_the_prompt_of_their_clip_and_no_more_frames_than_asked_for():
    asked: list[list[str]] = []

    def lengths(frames, prompts):
        asked.append(prompts)
        return [len(prompt) for prompt in prompts]

    reward = FunctionReward(lengths, per_frame=True, sample_fps=4.0, num_frames=2)
    assert reward(torch.zeros(3, 8, 4, 4, 3, dtype=torch.uint8), ["a", "bb", "cccc"], 8.0)["lengths"].tolist() == [
        1,
        2,
        4,
    ]
    assert asked == [["a", "a", "bb", "bb", "cccc", "cccc"]]


def test_metadata_is_no_option():
    with pytest.raises(RewardConfigError, match="not an option"):
        CompositeReward([toy("counts_words", options={"metadata": 1})])


def frames_by_number(count: int = 1) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8).view(1, 8, 1, 1, 1).expand(count, 8, 4, 4, 3).contiguous()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([], 3.5),
        ([1.0], 3.5),
        ([0, 0, 0, 0, 0, 0, 0, 5.0], 7.0),
        ([3.0, 0, 0, 0, 0, 0, 0, 1.0], 1.75),
        ([1.0, 0.0], (0 * 1 + 1 * 1 + 2 * 0.875 + 3 * 0.625 + 4 * 0.375 + 5 * 0.125) / 4.0),
    ],
)
def test_frames_count_by_their_weights(weights, expected):
    options = {"per_frame": True, "sample_fps": 8.0, "frame_weights": weights}
    composite = CompositeReward([toy("frame_number", options=options)])
    assert composite.score(frames_by_number(2), ["a", "b"], FPS)[0].total.tolist() == pytest.approx([expected] * 2)


def test_a_frame_that_does_not_count_cannot_fail_and_one_that_does_is_named():
    videos = frames_by_number(2)
    videos[1, 0] = 255
    plain = {"per_frame": True, "sample_fps": 8.0}
    scores, report = CompositeReward([toy("frame_number", options=plain)]).score(videos, ["a", "b"], FPS)
    assert scores.valid.tolist() == [True, False]
    assert report.failures[0].reason == "frame 0: part 'frame_number' is None"
    late = {**plain, "frame_weights": [0, 0, 0, 0, 1, 1, 1, 1]}
    assert CompositeReward([toy("frame_number", options=late)]).score(videos, ["a", "b"], FPS)[0].total.tolist() == [
        5.5,
        5.5,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_weights": [1.0]}, "per_frame"),
        ({"per_frame": True, "frame_weights": [1.0, -1.0]}, "0 or more"),
        ({"per_frame": True, "frame_weights": [0.0]}, "positive"),
        ({"per_frame": True, "frame_weights": [float("nan")]}, "0 or more"),
    ],
)
def test_wrong_frame_weights_are_refused(options, message):
    name = "frame_number" if options.get("per_frame") else "mean_level"
    with pytest.raises(RewardConfigError, match=message):
        CompositeReward([toy(name, options=options)])


def test_a_curve_keeps_its_points_and_its_ends():
    assert stretch([1.0, 2.0, 4.0], 3) == [1.0, 2.0, 4.0]
    assert stretch([5.0], 4) == [5.0] * 4
    assert stretch([0.0, 1.0], 4) == pytest.approx([0.0, 0.25, 0.75, 1.0])


@pytest.mark.parametrize("spec", [toy("asks_a_network"), toy("AsyncJudge")], ids=["function", "class"])
def test_async_rewards_are_awaited_also_where_a_loop_runs_already(spec):
    composite = CompositeReward([spec, toy("mean_level", metric_only=True)])
    expected = [float(len(prompt)) for prompt in PROMPTS]
    assert composite.score(clips(), PROMPTS, FPS)[0].total.tolist() == expected

    async def notebook():
        return composite.score(clips(), PROMPTS, FPS)[0].total.tolist()

    assert asyncio.run(notebook()) == expected


@pytest.mark.parametrize("overlapping", [(True, False), (False, True), (True, True)])
def test_rewards_that_overlap_run_at_the_same_time_and_report_in_order(overlapping, monkeypatch):
    monkeypatch.setattr(toy_rewards, "BOTH", threading.Barrier(2, timeout=20))
    first, second = overlapping
    specs = [
        toy("meets_second", overlap=second, isolate_failures=False, metric_only=True),
        toy("meets_first", overlap=first),
        toy("too_few", overlap=True, metric_only=True),
    ]
    composite = CompositeReward(specs)
    scores, report = composite.score(clips(2), PROMPTS[:2], FPS)
    assert scores.total.tolist() == [1.0, 1.0]
    assert [(one.reward, one.index) for one in report.failures] == [
        ("meets_second", 0), ("meets_second", 1), ("too_few", 0), ("too_few", 1),
    ]  # fmt: skip
    assert "KeyError" in report.failures[0].reason
    assert list(composite.seconds) == ["meets_second", "meets_first", "too_few"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [("interrupts", KeyboardInterrupt, ""), ("exits", SystemExit, "3"), ("in_place", RewardConfigError, "in place")],
)
def test_what_always_stops_a_run_stops_it_from_a_thread_too(name, error, said, overlap):
    with pytest.raises(error, match=said):
        CompositeReward([toy("mean_level"), toy(name, overlap=overlap)]).score(clips(), PROMPTS, FPS)


def test_a_reward_with_a_device_of_its_own_stays_there():
    specs = [toy("Movable", label="own", device="cpu"), toy("Movable", label="shared")]
    composite = CompositeReward(specs, offload_between=True)
    for _ in range(2):
        composite.score(clips(), PROMPTS, FPS)
    composite.try_out("x")
    own, shared = (member.reward.places for member in composite._members)
    assert own == ["cpu"]
    assert shared == ["cpu"] * 6


@pytest.mark.parametrize(("device", "message"), [("gpu", "not a device"), ("cuda:99", "CUDA devices")])
def test_a_device_that_is_not_there_is_refused(device, message):
    with pytest.raises(RewardConfigError, match=message):
        CompositeReward([toy("mean_level", device=device)])
