"""Training a learned reward: faults that are what they say, annotators who are wrong as they say, and a loss that recovers an order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from research.pretraining.scenes.faults import mistaken
from research.pretraining.scenes.reward import train_reward
from research.pretraining.scenes.reward_options import Biases, RewardOptions
from research.pretraining.scenes.votes import agreement, differences, impressions, people, votes
from research.scenes.judge import WEIGHTS
from research.scenes.learned import PARTS, LearnedReward
from research.scenes.scene import some_scenes

CPU = torch.device("cpu")
HONEST = Biases(annotators=1, noise=0, colour=0, motion=0, forgiven=0)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Told:
    """A judge that says what it was told, clip by clip."""

    names = (*PARTS, "TA/texture")

    def __init__(self, parts: Tensor, texture: float = 1.0) -> None:
        self.parts, self.texture, self.frames = parts, texture, 0

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        self.frames = videos.shape[1]
        found = {part: self.parts[:, place] for place, part in enumerate(PARTS)}
        return {**found, "TA/texture": torch.full((len(videos),), self.texture)}


def test_a_mistaken_scene_is_another_one_and_never_held_out() -> None:
    draw = random.Random(0)
    for scene in some_scenes("heldout", 20, 1) + some_scenes("train", 20, 1):
        other = mistaken(scene, draw)
        assert other != scene
        assert not other.heldout
        changed = [name for name, one, two in zip(WEIGHTS, scene.names, other.names) if one != two]
        assert 1 <= len(changed) <= 3


def test_honest_annotators_vote_as_the_judge_does() -> None:
    truth = torch.rand(8, 3, generator=drawn(3))
    clips = torch.randint(256, (8, 17, 8, 8, 3), generator=drawn(4)).to(torch.uint8)
    judge = Told(truth)
    told = impressions(judge, clips, [""] * 8, HONEST, people(HONEST, drawn()), drawn(), CPU)
    assert judge.frames == 9  # every other frame is all that they see
    shares = votes(told, 4)
    assert shares.shape == (2, 6, 3)
    assert torch.equal(shares > 0.5, differences(truth, 4) > 0)
    assert agreement(truth, shares - 0.5, 4) == dict.fromkeys(PARTS, 1.0)
    assert agreement(-truth, shares - 0.5, 4) == dict.fromkeys(PARTS, 0.0)


def test_a_reward_from_the_command_to_its_scores(tmp_path: Path) -> None:
    out = tmp_path / "reward"
    options = RewardOptions(out=out, prompts=4, heldout=2, group=3, steps=2, batch=2, width=32, layers=1)
    assert train_reward(options) == 0
    scores = json.loads((out / "scores.json").read_text())
    assert scores["pairs"] == 6
    assert scores["options"]["prompts"] == 4
    for name in ("reward and votes", "reward and truth", "votes and truth"):
        assert set(scores[name]) == set(PARTS)
    reward = LearnedReward(checkpoint=str(out))
    texts = ["a plain red ball bounces in a meadow"] * 2
    clips = torch.randint(256, (2, 17, 64, 64, 3), dtype=torch.uint8)
    assert all(torch.isfinite(score).all() for score in reward(clips, texts, 8.0).values())
