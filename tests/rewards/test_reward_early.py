"""Rewards that compute elsewhere begin while clips are still being decoded, and give what they would have given afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from test_reward_base import FPS, LEVELS, PROMPTS, clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError

ROWS = [{"worth": 3.0 * number} for number in range(5)]


def handed_on(composite: CompositeReward, pieces: list[int], prompts: list[str] = PROMPTS):
    """Clips that come in pieces of these sizes, then all of them scored."""
    with composite.early(FPS) as early:
        at = 0
        for count in pieces:
            early.add(clips()[at : at + count], prompts[at : at + count], ROWS[at : at + count])
            at += count
        return composite.score(clips(), prompts, FPS, ROWS, early)


@pytest.mark.parametrize("pieces", [[5], [1, 1, 1, 1, 1], [2, 3]])
def test_pieces_give_what_the_whole_gives(pieces: list[int]) -> None:
    specs = [
        toy("mean_level", overlap=True),
        toy("as_list", options={"offset": 0.5}, weights={"length": 3.0}),
        toy("raises_for_bad", overlap=True, metric_only=True),
        toy("Explains", overlap=True, metric_only=True, batch_size=2),
        toy("worth", overlap=True, metric_only=True),
    ]
    prompts = ["one", "two", "three bad", "four", "five"]
    expected, plain = CompositeReward(specs).score(clips(), prompts, FPS, ROWS)
    scores, report = handed_on(CompositeReward(specs), pieces, prompts)
    torch.testing.assert_close(scores.total, expected.total)
    assert list(scores.parts) == list(expected.parts)
    for part, value in scores.parts.items():
        if part != "raises_for_bad":  # which fails with all clips of a call
            assert torch.equal(value, expected.parts[part])
    assert scores.parts["worth"].tolist() == [row["worth"] for row in ROWS]
    assert [(one.reward, one.index, one.prompt) for one in report.failures] == [
        (one.reward, one.index, one.prompt) for one in plain.failures
    ]
    assert [(one.index, one.prompt, one.reason) for one in report.remarks] == [
        (index, prompt, f"because of {prompt}") for index, prompt in enumerate(prompts) if prompt != "two"
    ]
    assert report.remarks == plain.remarks


def test_it_begins_before_the_last_clip_is_there(monkeypatch) -> None:
    import toy_rewards

    begun = threading.Event()

    def watched(videos, prompts, fps):
        begun.set()
        return videos.float().mean((1, 2, 3, 4))

    monkeypatch.setattr(toy_rewards, "mean_level", watched)
    composite = CompositeReward([toy("mean_level", overlap=True)])
    with composite.early(FPS) as early:
        early.add(clips()[:1], PROMPTS[:1], [{}])
        assert begun.wait(timeout=60)
        early.add(clips()[1:], PROMPTS[1:], [{}] * 4)
        scores, _ = composite.score(clips(), PROMPTS, FPS, early=early)
    torch.testing.assert_close(scores.total, LEVELS)


def test_those_that_do_not_overlap_see_all_clips_at_once() -> None:
    composite = CompositeReward(
        [toy("mean_level", batch_size=0), toy("as_list", weights={"length": 1.0}, overlap=True)]
    )
    with composite.early(FPS) as early:
        early.add(clips(), PROMPTS, [{}] * 5)
        assert list(early.outcomes()) == ["as_list"]


def test_one_that_shares_the_policys_device_waits() -> None:
    class Weighty:
        names = ("level",)

        def to(self, device: torch.device) -> None:
            pass

        def __call__(self, videos, prompts, fps):
            return {"level": videos.float().mean((1, 2, 3, 4))}

    for device, begins in (("", False), ("cpu", True)):
        spec = toy("mean_level", overlap=True, device=device)
        composite = CompositeReward([spec], objects={spec.name: Weighty()})
        with composite.early(FPS) as early:
            early.add(clips(), PROMPTS, [{}] * 5)
            assert ("mean_level" in early.outcomes()) == begins


def test_what_is_wrong_with_a_reward_is_said_and_nothing_is_waited_for() -> None:
    composite = CompositeReward([toy("in_place", overlap=True)])
    with pytest.raises(RewardConfigError, match="changed the clips"):
        handed_on(composite, [2, 3])


def test_no_clips_at_all() -> None:
    """More ranks than micro-batches: one of them has nothing to hand on, and still answers with every part."""
    composite = CompositeReward([toy("mean_level", overlap=True), toy("as_list", weights={"length": 3.0})])
    with composite.early(FPS) as early:
        assert not early.outcomes()
        scores, report = composite.score(clips()[:0], [], FPS, early=early)
    assert {name: len(part) for name, part in scores.parts.items()} == dict.fromkeys(composite.names, 0)
    assert (len(scores.total), report.total) == (0, 0)
