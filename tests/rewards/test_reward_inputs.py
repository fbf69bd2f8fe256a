"""What a reward is handed: memory of its own, metadata, frames with weights, sound, threads, a device, and clips before the last is decoded."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
import toy_rewards
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.types import Sound

FPS = 8.0
LEVELS = torch.arange(5).float() * 10 + 5
PROMPTS = ["one", "two three", "four", "five", "six"]


@pytest.mark.parametrize("size", [0, 2])
def test_a_write_through_numpy_reaches_nobody_else(size):
    videos = clips()
    composite = CompositeReward([toy("through_numpy", batch_size=size), toy("mean_level"), toy("as_list")])
    scores = composite.score(videos, PROMPTS, FPS)[0]
    assert torch.equal(videos, clips())  # what is saved afterwards
    torch.testing.assert_close(scores.parts["mean_level"], LEVELS)
    torch.testing.assert_close(scores.parts["as_list"], torch.tensor([float(len(p)) for p in PROMPTS]))


def test_what_ships_with_the_package_gets_no_copy():
    seen, videos, names = [], clips(), ("ocr", "toy_rewards:mean_level")

    def watched(videos, prompts, fps):
        seen.append(videos.untyped_storage().data_ptr())
        return [0.0] * len(prompts)

    objects = {name: FunctionReward(watched) for name in names}
    CompositeReward([RewardSpec(name=name) for name in names], objects=objects).score(videos, PROMPTS, FPS)
    assert [pointer == videos.untyped_storage().data_ptr() for pointer in seen] == [True, False]


@pytest.mark.parametrize("size", [0, 2])
def test_rewards_that_ask_for_metadata_get_each_clips_row(size):
    rows = [{"words": "1"}, {"words": "2", "image": "first.png"}, {"words": "9"}, {}, {"words": 1}]
    composite = CompositeReward([toy("counts_words", batch_size=size), toy("TakesMetadata", batch_size=size)])
    scores = composite.score(clips(), PROMPTS, FPS, rows)[0]
    assert scores.parts["counts_words"].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    # the rows that the first reward emptied were its own
    assert scores.parts["image"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert rows[1] == {"words": "2", "image": "first.png"}
    without = composite.score(clips(), PROMPTS, FPS)[0]
    assert without.parts["counts_words"].tolist() == [0.0] * 5
    with pytest.raises(ValueError, match="One row of metadata a clip"):
        composite.score(clips(), PROMPTS, FPS, rows[:3])[0]


@pytest.mark.parametrize("spec", [toy("asks_a_network"), toy("AsyncJudge")], ids=["function", "class"])
def test_async_rewards_are_awaited_also_where_a_loop_runs_already(spec):
    composite = CompositeReward([spec, toy("mean_level", metric_only=True)])
    assert composite.score(clips(), PROMPTS, FPS)[0].total.tolist() == LEVELS.tolist()

    async def notebook():
        return composite.score(clips(), PROMPTS, FPS)[0].total.tolist()

    assert asyncio.run(notebook()) == LEVELS.tolist()


@pytest.mark.parametrize("second", [False, True])
def test_rewards_that_overlap_run_at_the_same_time_and_report_in_order(second, monkeypatch):
    monkeypatch.setattr(toy_rewards, "BOTH", threading.Barrier(2, timeout=20))
    failing = toy("meets_second", overlap=second, metric_only=True)
    few = toy("too_few", overlap=True, metric_only=True)
    composite = CompositeReward([failing, toy("meets_first", overlap=True), few])
    scores, report = composite.score(clips(1), PROMPTS[:1], FPS)
    assert scores.total.tolist() == [1.0]
    failed = [(one.reward, one.index) for one in report.failures]
    assert failed == [("meets_second", 0), ("too_few", 0)]
    assert "KeyError" in report.failures[0].reason


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (toy("mean_level", device="gpu"), "gpu"),
        (toy("mean_level", device="cuda:99"), "cuda:99"),
    ],
)
def test_devices_that_are_not_there_are_refused(spec, why):
    with pytest.raises(RewardConfigError, match=why):
        CompositeReward([spec])


def stops(videos, prompts, fps, error):
    raise {"interrupts": KeyboardInterrupt, "exits": SystemExit}[error]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_always_stops_a_run_stops_it_from_a_thread_too(overlap):
    for option, error in (("interrupts", KeyboardInterrupt), ("exits", SystemExit)):
        spec = RewardSpec(name=f"{__name__}:stops", options={"error": option}, overlap=overlap)
        with pytest.raises(error):
            CompositeReward([toy("mean_level"), spec]).score(clips(), PROMPTS, FPS)
    with pytest.raises(RewardConfigError, match="in place"):
        CompositeReward([toy("mean_level"), toy("in_place", overlap=overlap)]).score(clips(), PROMPTS, FPS)


HEARD: list[tuple[int, ...]] = []


def hears_a_level(videos, prompts, fps, sound):
    HEARD.append((*sound.waves.shape, sound.rate))
    return sound.waves.square().mean((1, 2))


@pytest.mark.parametrize("overlap", [False, True])
def test_listening_rewards_hear_their_clips_wherever_they_run(overlap):
    levels = torch.tensor([0.1, 0.4, 0.2, 0.8, 0.3])
    listening = RewardSpec(name=f"{__name__}:hears_a_level", overlap=overlap, batch_size=2)
    specs = [toy("mean_level", overlap=True), listening]
    composite, sound = CompositeReward(specs), Sound(levels.view(5, 1, 1).expand(5, 2, 80), 16_000)
    scores, report = composite.score(clips(), PROMPTS, FPS, sound=sound)
    assert not report.failures
    torch.testing.assert_close(scores.parts["hears_a_level"], levels**2)
    assert composite.hears
    assert composite.try_out("x") == ""
    assert HEARD[-1] == (1, 2, 17 * 16_000 // 8, 16_000)  # stereo, as long as the small clip
    with pytest.raises(RewardConfigError, match=r"listens to clips .* and these are silent"):
        composite.score(clips(), PROMPTS, FPS)


def test_remarks_of_batches_name_their_clips() -> None:
    prompts = ["one", "two", "three bad", "four", "five"]
    report = CompositeReward([toy("with_reasons", batch_size=2)]).score(clips(), prompts, FPS)[1]
    found = [(one.index, one.prompt, one.reason) for one in report.remarks]
    assert found == [(index, prompts[index], f"because of {prompts[index]}") for index in (0, 2, 3, 4)]


def test_no_clips_at_all() -> None:
    """More ranks than micro-batches: one of them has nothing to hand on, and still answers with every part."""
    composite = CompositeReward([toy("mean_level", overlap=True), toy("as_list", weights={"length": 3.0})])
    scores, report = composite.score(clips()[:0], [], FPS)
    assert {name: len(part) for name, part in scores.parts.items()} == dict.fromkeys(composite.names, 0)
    assert (len(scores.total), len(report.failures)) == (0, 0)


def test_weights_move_for_a_call_and_back_but_stay_on_a_device_of_their_own():
    specs = [toy("Movable", label="own", device="cpu"), toy("Movable", label="shared", options={"gain": 2.0})]
    composite = CompositeReward(specs, offload_between=True)
    for _ in range(2):
        composite.score(clips(), PROMPTS, FPS)
    composite.try_out("x")
    own, shared = (member.reward.places for member in composite._members)
    assert own == ["cpu"]
    assert shared == ["cpu"] * 6
    elsewhere = CompositeReward([toy("Movable")], device="meta")
    elsewhere.onload()
    elsewhere.offload()
    assert elsewhere._members[0].reward.places == ["meta", "cpu"]
