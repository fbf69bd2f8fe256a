"""Given clips of several formats: each row is learned in the one that shows most of it, by the same weights, and nothing else changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sage_grpo.configure import ConfigError
from sage_grpo.data.examples import format_of
from sage_grpo.data.formats import CARD, usable
from sage_grpo.data.prompts import Prompt
from sage_grpo.models import ModelError
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.session import run as train
from sage_grpo.training.config import BatchConfig, DataConfig
from sage_grpo.training.decoding import LATENTS
from sage_grpo.training.inputs import Given, build
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import Conditioning, VideoSpec
from sage_grpo.video import write_mp4
from trainer_helpers import assert_resumes_to_the_bit
from trainer_zoo.toy import WORDS, ToyModel

OWN, TALL, SHORT = "4x8x8", "2x12x4", "2x8x8"
SIZES = {"square": (6, 8, 8), "tall": (6, 12, 4), "brief": (3, 8, 8), "taller": (6, 16, 4)}
"""Frames, height and width of the clips of four rows."""


class AnySize(ToyModel):
    """A toy that looks at one latent at a time, so that clips may have any size."""

    def __init__(self, spec, video: VideoSpec = VideoSpec(frames=4, height=8, width=8, fps=8.0)) -> None:  # noqa: B008
        super().__init__(spec)
        torch.manual_seed(0)
        self.network, self.video = nn.Linear(3 + WORDS + 1, 3), video

    def blocks(self) -> list[nn.Module]:
        return [self.network]

    def latent_shape(self) -> tuple[int, ...]:
        return 3, self.video.frames, self.video.height // 2, self.video.width // 2

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance=None) -> Tensor:
        assert tuple(x.shape[1:]) == self.latent_shape()
        words = torch.stack([condition.tensors["words"] for condition in conditions])
        told = torch.cat([words, torch.as_tensor(sigma).to(x).expand(len(x), 1)], 1)
        seen = x.movedim(1, -1)
        told = told[:, None, None, None].expand(*seen.shape[:-1], -1)
        return self.network(torch.cat([seen, told], -1)).movedim(-1, 1)

    def in_format(self, video: VideoSpec) -> AnySize:
        if video.height % 2:
            raise ModelError(f"model.height must be a multiple of 2 here, got {video.height}.")
        other = copy.copy(self)
        other.video = video
        return other


def clip(size: tuple[int, int, int], grey: int) -> Tensor:
    noise = torch.randint(-8, 8, (*size, 3), generator=torch.Generator().manual_seed(grey))
    return (grey + noise).to(torch.uint8)


@pytest.fixture
def pairs(tmp_path) -> Path:
    """A row of every size."""
    lines = []
    for place, (name, size) in enumerate(SIZES.items()):
        for side, grey in (("win", 200 - place), ("lose", 60 + place)):
            write_mp4(tmp_path / f"{name}-{side}.mp4", clip(size, grey), 8.0)
        lines.append({"prompt": name, "win": f"{name}-win.mp4", "lose": f"{name}-lose.mp4"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def several(make_config, pairs):
    """Makes the configuration of a run on these clips in three formats."""

    def make(method: str = "dpo", **fields):
        config = METHODS[method](make_config(batch=BatchConfig(prompts=4, group_size=4, micro_batch=2)))
        data = replace(config.data, clips=str(pairs), formats=[TALL, SHORT])
        objective = replace(config.objective, levels=2, draw="schedule", beta=50.0)
        return replace(config, **{"data": data, "objective": objective, "rewards": [], **fields})

    return make


def built(config):
    return build(config, given=Given(model=AnySize(config.model)))


def made(config) -> Trainer:
    return Trainer(config, built(config))


def test_a_resumed_run_is_the_same_run(several, tmp_path) -> None:
    assert_resumes_to_the_bit(made, several("rft"), tmp_path / "saved")


def header(folder: Path, frames: int, height: int, width: int, fps: float = 8.0) -> Prompt:
    file = folder / f"{frames}-{height}-{width}-{fps:g}.mp4"
    write_mp4(file, clip((frames, height, width), 90), fps)
    return Prompt(file.stem, clips=(file,))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((8, 16, 16), OWN),  # as long and as square
        ((8, 16, 8), OWN),  # half of the picture for twice as long
        ((8, 16, 4), TALL),  # a quarter of the picture
        ((3, 16, 16), SHORT),  # too short for the longer one
        ((12, 16, 16, 24.0), OWN),  # every third frame
        ((9, 16, 16, 24.0), SHORT),
        ((8, 12, 4), TALL),
        ((8, 24, 24), OWN),
    ],
)
def test_a_row_has_the_format_that_shows_most_of_it(size: tuple, expected: str, tmp_path) -> None:
    formats = [format_of(text, 8.0) for text in (OWN, TALL, SHORT)]
    (tmp_path / "clips.jsonl").touch()
    found = usable(str(tmp_path / "clips.jsonl"), [header(tmp_path, *size)], formats)
    assert (found.prompts[0].format or formats[0]) == format_of(expected, 8.0)


def test_of_formats_that_show_as_much_the_nearest_in_size_is_taken(tmp_path) -> None:
    formats = [format_of(text, 8.0) for text in ("2x16x16", "2x8x8", "2x4x4")]
    (tmp_path / "clips.jsonl").touch()
    found = usable(str(tmp_path / "clips.jsonl"), [header(tmp_path, 2, side, side) for side in (18, 10, 4)], formats)
    assert [prompt.format for prompt in found.prompts] == [None, *formats[1:]]


def test_the_card_says_which_formats_there_are_and_what_they_show(several, pairs) -> None:
    write_mp4(pairs.parent / "brief-lose.mp4", clip((1, 8, 8), 60), 8.0)
    config = several(iterations=1)
    found = built(config).examples
    assert "3 rows with 6 clips (2 as 4x8x8, 4 as 2x12x4, 0 as 2x8x8); 1 rows are left out" in found.summary
    assert "brief-lose.mp4 is too short: 1 frames at 8 fps, 2 at 8 fps take 2" in found.summary
    own, tall = found.card(AnySize(config.model).video)["formats"]
    assert (own["frames"], own["clips"], own["shown"]) == (4, 2, pytest.approx(4 / 6))
    # all of the picture and a third of the frames; and of the taller clips three quarters of that
    assert (tall["height"], tall["clips"], tall["least_shown"]) == (12, 4, pytest.approx(1 / 4))
    assert tall["shown"] == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_a_run_writes_the_card_and_encodes_each_clip_once_in_its_format(several) -> None:
    config = several(iterations=2)
    train(config, given=Given(model=AnySize(config.model)))
    card = json.loads((Path(config.out) / CARD).read_text())
    assert [row["clips"] for row in card["formats"]] == [2, 4, 2]
    assert len(list((Path(config.out) / LATENTS).rglob("*.safetensors"))) == 8
    alone = replace(config, data=replace(config.data, formats=[]))
    trainer = made(alone)
    trainer.step()  # the same files in another format are other latents
    assert len(list((Path(config.out) / LATENTS).rglob("*.safetensors"))) == 8 + 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": ["2x16x16"]}, r"2x16x16, whose clips have 384 latents and the model's own 192: memory"),
        ({"data": ["2x7x8"]}, "data.formats 2x7x8: model.height must be a multiple of 2"),
        ({"parallel": ParallelSpec(sp=2)}, r"parallel\.sp 2: ranks share the tokens"),
    ],
)
def test_what_a_run_cannot_do_is_refused(change: dict, words: str, several) -> None:
    config = several()
    if "data" in change:
        change = {"data": replace(config.data, formats=change["data"])}
    with pytest.raises(ConfigError, match=words):
        built(replace(config, **change))


@pytest.mark.parametrize("text", ["81x480", "81x480x", "0x8x8", "81 x 480 x 832", "-1x8x8"])
def test_a_format_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FRAMESxHEIGHTxWIDTH"):
        DataConfig(clips="pairs.jsonl", formats=[text])
    with pytest.raises(ValueError, match="only given clips"):
        DataConfig(formats=[OWN])
