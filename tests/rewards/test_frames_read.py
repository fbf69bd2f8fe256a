"""Rewards say which frames they read: what they score is the same to the bit when all others are black."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_layouts import open_clip_state, write_bert_tokenizer, write_imagereward
from safetensors.torch import save_file
from tiny_reward_checkpoints import (
    TEMPLATE,
    reference_model,
    write_clip,
    write_dino,
    write_qwen_base,
    write_videoalign,
)

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.clip import Aesthetic, ClipScore, Hpsv2, PickScore
from sage_grpo.rewards.built_in.consistency import BackgroundConsistency, SubjectConsistency
from sage_grpo.rewards.built_in.hpsv3 import Hpsv3
from sage_grpo.rewards.built_in.imagereward import ImageReward
from sage_grpo.rewards.built_in.ocr import OcrReward
from sage_grpo.rewards.built_in.videoalign import VideoAlign
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError
from sage_grpo.rewards.judge.vlm import VlmJudge
from sage_grpo.rewards.spec import BUILT_IN, RewardSpec, find_reward, own_reward
from sage_grpo.types import ReadsFrames

FRAMES, FPS = 17, 8.0
PROMPTS = ['a red "ball"', 'two "squares" that move']


def clips() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(1, 256, (2, FRAMES, 5, 7, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def black(videos: torch.Tensor, frames: list[int]) -> torch.Tensor:
    """The same clips with these frames black."""
    videos = videos.clone()
    videos[:, frames] = 0
    return videos


def _videoalign(folder: Path) -> VideoAlign:
    base = write_qwen_base(folder / "base", layers=1)
    model, head, _ = reference_model(base, lora=False, output_dim=1)
    template = folder / "prompt_template.py"
    template.write_text(f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEMPLATE!r}\n")
    (folder / "videoalign").mkdir()
    written = write_videoalign(folder / "videoalign", model, head, kind="whole")
    return VideoAlign(checkpoint=str(written), base=str(base), template=str(template))


def _aesthetic(folder: Path) -> Aesthetic:
    save_file({"0.weight": torch.randn(1, 16), "0.bias": torch.zeros(1)}, folder / "head.safetensors")
    return Aesthetic(model=str(write_clip(folder / "clip")), head=str(folder / "head.safetensors"))


def _hpsv2(folder: Path) -> Hpsv2:
    save_file(open_clip_state(), folder / "hps.safetensors")
    return Hpsv2(checkpoint=str(folder / "hps.safetensors"), base=str(write_clip(folder / "clip")))


def _hpsv3(folder: Path) -> Hpsv3:
    """Its network in the place of 7 billion weights; what it is shown is its own."""
    one = object.__new__(Hpsv3)
    one._sample_fps, one._num_frames = 1.0, 4
    one._score = lambda frames, prompts: frames.float().mean(dim=(1, 2, 3))
    return one


def _imagereward(folder: Path) -> ImageReward:
    write_imagereward(folder)
    write_bert_tokenizer(folder / "bert")
    files = {"checkpoint": "imagereward.safetensors", "config": "med_config.json", "tokenizer": "bert"}
    return ImageReward(**{name: str(folder / file) for name, file in files.items()})


def _ocr(folder: Path) -> OcrReward:
    """Reads a frame's brightness, as letters."""
    corners = [[0, 0], [9, 0], [9, 9], [0, 9]]
    return OcrReward(engine=lambda frame: ([(corners, "ball squares"[: 1 + int(frame.mean()) % 12], 0.9)], None))


class Judged(VlmJudge):
    """Scores a clip by what would be sent of it."""

    def __call__(self, videos, prompts, fps):
        sent = [self.request([clip], prompt, fps) for clip, prompt in zip(videos, prompts)]
        return {"look": torch.tensor([float(sum(body)) for body in sent])}


REWARDS: dict[str, Callable[[Path], Any]] = {
    "videoalign": _videoalign,
    "clip": lambda folder: ClipScore(model=str(write_clip(folder)), clamp=False),
    "pickscore": lambda folder: PickScore(model=str(write_clip(folder)), num_frames=3),
    "aesthetic": _aesthetic,
    "hpsv2": _hpsv2,
    "hpsv3": _hpsv3,
    "imagereward": _imagereward,
    "subject_consistency": lambda folder: SubjectConsistency(model=str(write_dino(folder)), size=56, sample_fps=2.0),
    "background_consistency": lambda folder: BackgroundConsistency(model=str(write_clip(folder)), sample_fps=2.0),
    "ocr": _ocr,
    "vlm_judge": lambda folder: Judged(url="http://localhost:1/v1", model="m", dimensions={"look": "how"}),
    "a function of frames": lambda folder: FunctionReward(
        lambda frames, prompts: frames.float().mean(dim=(1, 2, 3)),
        parts=["level"],
        per_frame=True,
        frame_weights=[0.0, 1.0, 3.0],
    ),
}


@pytest.fixture(scope="module", params=REWARDS)
def made(request, tmp_path_factory) -> tuple[str, Any]:
    torch.manual_seed(0)
    return request.param, REWARDS[request.param](tmp_path_factory.mktemp("reward"))


def test_a_reward_reads_the_frames_that_it_names_and_no_others(made: tuple[str, Any]) -> None:
    (name, reward), videos = made, clips()
    assert isinstance(reward, ReadsFrames)
    read = reward.frames_read(FRAMES, FPS)
    assert 0 < len(read) < FRAMES
    scores = reward(videos, PROMPTS, FPS)
    others = black(videos, [index for index in range(FRAMES) if index not in read])
    for part, values in reward(others, PROMPTS, FPS).items():
        assert torch.equal(values, scores[part]), part
    if name not in ("videoalign", "subject_consistency"):  # every other one: these take long
        for index in read:
            spoilt = reward(black(videos, [index]), PROMPTS, FPS)
            assert any(not torch.equal(values, scores[part]) for part, values in spoilt.items()), index


def test_every_built_in_reward_that_samples_frames_says_so() -> None:
    """What is left looks at every frame, or hands whole clips on."""
    kinds = {name: find_reward(RewardSpec(name=name)) for name in BUILT_IN if "scenes" not in name}
    silent = {name for name, kind in kinds.items() if "frames_read" not in dir(kind)}
    assert silent == {"video_stats", "sound_stats", "clap", "remote", "shapes", "shapes_proxy"}
    assert kinds.keys() - silent - {"sight_and_sound"} == REWARDS.keys() - {"a function of frames"}


def whole(videos, prompts, fps):
    return videos.float().mean(dim=(1, 2, 3, 4))


class Reads:
    """Says what it is told to say."""

    names = ("level",)

    def __init__(self, frames: list[int] | Exception | None) -> None:
        self.frames = frames

    def frames_read(self, count: int, fps: float) -> list[int] | None:
        if isinstance(self.frames, Exception):
            raise self.frames
        return self.frames

    def __call__(self, videos, prompts, fps):
        return {"level": videos.float().mean(dim=(1, 2, 3, 4))}


def together(*rewards: Any) -> CompositeReward:
    given = [own_reward(one, label=f"r{number}") for number, one in enumerate(rewards)]
    return CompositeReward([one.spec for one in given], objects={one.spec.name: one.reward for one in given})


def test_rewards_together_read_what_any_of_them_reads_and_all_where_one_does_not_say() -> None:
    assert together(Reads([7, 2]), Reads([2, 5])).frames_read(9, FPS) == [2, 5, 7]
    for other in (whole, Reads(None), Reads(ValueError("too short"))):
        assert together(Reads([7, 2]), other).frames_read(9, FPS) is None


@pytest.mark.parametrize("index", [-1, 9])
def test_a_frame_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(RewardConfigError, match=rf"frames_read names frame {index} of a clip of 9 frames"):
        together(Reads([0, index])).frames_read(9, FPS)
