"""Clips that are given: read, brought into the run's format, encoded once, and learned in place of rollouts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from sage_grpo.data.examples import load_examples
from sage_grpo.data.formats import fitted, frames_at
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.decoding import LATENTS, Encoder
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import Sound, VideoSpec
from sage_grpo.video import write_mp4
from trainer_helpers import same, weights_of
from trainer_zoo.toy import ToyModel

WORDS = ("a cat", "a red dog", "a bird", "the sea")
FORMAT = VideoSpec(frames=2, height=8, width=8, fps=8.0)


def clip(grey: int, frames: int = 3) -> torch.Tensor:
    noise = torch.randint(-8, 8, (frames, 8, 8, 3), generator=torch.Generator().manual_seed(grey))
    return (grey + noise).to(torch.uint8)


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Four prompts, each with a bright clip that is preferred and a dark one."""
    lines = []
    for place, words in enumerate(WORDS):
        for name, grey in (("win", 200 - place), ("lose", 60 + place)):
            write_mp4(tmp_path / f"{name}{place}.mp4", clip(grey), 8.0)
        lines.append({"prompt": words, "win": f"win{place}.mp4", "lose": f"lose{place}.mp4"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def offline(make_config, pairs):
    """Makes the configuration of a run on these clips."""

    def make(method: str = "dpo", **fields):
        config = METHODS[method](make_config(batch=BatchConfig(prompts=2, group_size=4, micro_batch=1)))
        data = replace(config.data, clips=str(pairs))
        objective = replace(config.objective, levels=2, draw="schedule", beta=50.0)
        return replace(config, **{"data": data, "objective": objective, "rewards": [], **fields})

    return make


def made(config) -> Trainer:
    return Trainer(config, build(config))


def test_the_better_clip_is_predicted_ever_better_than_the_worse(offline) -> None:
    trainer = made(offline())
    assert [offline(method).group_size for method in ("dpo", "rft")] == [2, 1]
    found = [trainer.step() for _ in range(12)]
    assert found[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["preference/lead"] > 0.05
    assert found[-1]["loss/policy"] < found[0]["loss/policy"]
    assert not [name for row in found for name in row if name.startswith(("reward/", "video/", "advantage/"))]


def test_latents_are_encoded_once_and_by_content(offline, pairs, monkeypatch) -> None:
    config = offline()
    first = made(config)
    for _ in range(4):
        first.step()
    weights = weights_of(first)
    files = sorted((Path(config.out) / LATENTS).rglob("*.safetensors"))
    assert len(files) == 8
    again = made(config)
    with monkeypatch.context() as patch:
        patch.setattr(type(again.model), "to_latents", lambda *_: pytest.fail("encoded again"))
        for _ in range(4):
            again.step()
    assert same(weights, weights_of(again))
    write_mp4(pairs.parent / "win0.mp4", clip(150), 8.0)  # other content under the same name
    other = made(config)
    for _ in range(4):
        other.step()
    assert not same(weights, weights_of(other))


def test_rows_that_are_too_short_or_broken_are_left_out_and_named(offline, pairs) -> None:
    write_mp4(pairs.parent / "lose1.mp4", clip(60, frames=1), 8.0)
    (pairs.parent / "win2.mp4").write_bytes(b"no video")
    inputs = build(offline())
    assert [prompt.text for prompt in inputs.prompts] == ["a cat", "the sea"]
    found = inputs.examples
    assert [prompt for prompt, _ in found.skipped] == ["a red dog", "a bird"]
    assert "lose1.mp4 is too short: 1 frames at 8 fps, 2 at 8 fps take 2" in found.summary
    card = found.card(FORMAT)
    assert (card["rows"], len(card["clips"]), len(card["skipped"])) == (2, 4, 2)
    for name in ("lose0", "win3"):
        (pairs.parent / f"{name}.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match="none of the 4 rows can be used"):
        build(offline())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "win": "win0.mp4"}, "win and lose, or clip"),
        ({"prompt": "a", "clip": "win0.mp4"}, "learns from pairs"),
        ({"prompt": "a", "win": "win0.mp4", "lose": "none.mp4"}, "there is no clip"),
        ({"prompt": "a", "win": 3, "lose": "lose0.mp4"}, "must be the path of a clip"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(row: dict, words: str, pairs) -> None:
    pairs.write_text(json.dumps(row))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_examples(pairs, pairs=True)


def test_a_folder_has_one_list_and_sft_takes_either_kind(pairs) -> None:
    (found,) = {len(prompt.clips) for prompt in load_examples(pairs.parent, pairs=True)}
    assert found == 2
    assert [prompt.clips[0].name for prompt in load_examples(pairs.parent, pairs=False)][:2] == ["win0.mp4", "win1.mp4"]
    (pairs.parent / "clips.csv").write_text("prompt,clip,mood\na cat,lose0.mp4,glad\n")
    (one,) = load_examples(pairs.parent / "clips.csv", pairs=False)
    assert (one.clips[0].name, dict(one.metadata)) == ("lose0.mp4", {"mood": "glad"})
    (pairs.parent / "clips.jsonl").write_text("")
    with pytest.raises(ValueError, match="has both of"):
        load_examples(pairs.parent, pairs=True)
    with pytest.raises(ValueError, match=r"listed in a \.jsonl or \.csv"):
        load_examples("clips.txt", pairs=True)


def test_frames_follow_the_rhythm_of_the_format() -> None:
    assert frames_at(8.0, FORMAT) == [0, 1]
    assert frames_at(24.0, replace(FORMAT, frames=4)) == [0, 3, 6, 9]
    assert frames_at(12.0, replace(FORMAT, frames=4)) == [0, 2, 3, 5]


def test_a_clip_is_cut_from_its_middle_and_keeps_its_proportions() -> None:
    wide = torch.zeros(2, 16, 64, 3, dtype=torch.uint8)
    wide[:, :, 24:40] = 255  # the middle square is white
    assert int(fitted(wide, 8.0, FORMAT)[:, :, 1:-1].min()) > 240
    own = clip(120, frames=2)
    assert torch.equal(fitted(own, 8.0, FORMAT), own)
    with pytest.raises(ValueError, match="too short"):
        fitted(own[:1], 8.0, FORMAT)


class Hearing(ToyModel):
    """A toy that is told how clips sound."""

    heard_rate = 16000

    def to_latents(self, clips, sound=None):
        self.sound = sound
        return super().to_latents(clips)


def test_a_sound_reaches_the_model_at_its_rate(tmp_path) -> None:
    """A file at 22,050 Hz with a tone of 440 Hz: the tone, the length and one row of one clip."""
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(2 * 22050) / 22050)
    write_mp4(tmp_path / "tone.mp4", clip(90, frames=16), 8.0, sound=Sound(tone[None], 22050))
    model = Hearing(ModelSpec(family="trainer_zoo.toy"))
    Encoder(model, tmp_path / "latents", nullcontext)(tmp_path / "tone.mp4")
    waves = model.sound.waves
    assert (model.sound.rate, waves.ndim, len(waves)) == (16000, 3, 1)
    assert waves.shape[-1] == pytest.approx(2 * 16000, rel=0.1)
    loudest = int(torch.fft.rfft(waves[0, 0]).abs().argmax())
    assert loudest * 16000 / waves.shape[-1] == pytest.approx(440, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "rft"])
def test_clips_with_a_sound_are_learned_with_it(method: str, make_config, tmp_path) -> None:
    """LTX-2: the better clip sounds and the worse one is silent, because its file has no sound."""
    shown = torch.stack([tiny.image(frame, 32, 32) for frame in range(5)])
    sound = Sound(0.5 * torch.sin(torch.arange(8000) / 20)[None], 8000)
    write_mp4(tmp_path / "win.mp4", shown, 8.0, sound=sound)
    write_mp4(tmp_path / "lose.mp4", shown, 8.0)
    row = {"prompt": "a cat", "win": "win.mp4", "lose": "lose.mp4"}
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    small = {"frames": 5, "height": 32, "width": 32, "guidance_scale": 1.0}
    config = METHODS[method](make_config(kind="ltx2", model=small, batch=BatchConfig(prompts=2, micro_batch=2)))
    objective = replace(config.objective, levels=2, draw="schedule")
    data = replace(config.data, clips=str(tmp_path / "pairs.jsonl"), eval_prompts=None)
    trainer = made(replace(config, data=data, objective=objective, rewards=[]))
    before = weights_of(trainer)
    if method == "dpo":
        with pytest.warns(UserWarning, match=r"lose\.mp4 has no sound: its clip is learned as a silent one"):
            trainer.step()
    else:
        trainer.step()
    assert not same(before, weights_of(trainer))
    parts = trainer.model.parts.split(trainer.studio.encoder(tmp_path / "win.mp4")[None])
    silent = trainer.model.parts.split(trainer.studio.encoder(tmp_path / "lose.mp4")[None])
    assert torch.equal(parts["video"], silent["video"])
    assert (parts["audio"] - silent["audio"]).abs().max() > 1e-2
