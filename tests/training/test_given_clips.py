"""Clips that are given: read, brought into the run's format, encoded once, and learned in place of rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_grpo.data.examples import _shortness, fitted, frames_at, load_examples
from sage_grpo.run.session import assemble
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.inputs import LATENTS, build
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import VideoSpec
from sage_grpo.utils.video import write_mp4
from trainer_helpers import of_method, same, weights_of
from trainer_zoo.toy import ToyModel

FORMAT = VideoSpec(frames=2, height=8, width=8, fps=8.0)


def clip(grey: int, frames: int = 3, height: int = 8, width: int = 8) -> Tensor:
    noise = torch.randint(-8, 8, (frames, height, width, 3), generator=torch.Generator().manual_seed(grey))
    return (grey + noise).to(torch.uint8)


def pairs_of(folder: Path, sizes: dict[str, tuple[int, ...]]) -> Path:
    """A list of prompts, each with a bright clip that is preferred and a dark one."""
    lines = []
    for place, (words, size) in enumerate(sizes.items()):
        row = {"prompt": words, "win": f"win{place}.mp4", "lose": f"lose{place}.mp4"}
        write_mp4(folder / row["win"], clip(200 - place, *size), 8.0)
        write_mp4(folder / row["lose"], clip(60 + place, *size), 8.0)
        lines.append(json.dumps(row))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


@pytest.fixture
def pairs(tmp_path) -> Path:
    return pairs_of(tmp_path, dict.fromkeys(("a cat", "a red dog", "a bird", "the sea"), (3, 8, 8)))


def learning(make_config, file: Path, method: str = "dpo", *, prompts: int = 2, **data):
    config = of_method(method, make_config(batch=BatchConfig(prompts=prompts, group_size=4, micro_batch=2)))
    objective = replace(config.objective, levels=2, draw="schedule", beta=50.0)
    return replace(config, data=replace(config.data, clips=str(file), **data), objective=objective, rewards=[])


@pytest.fixture
def offline(make_config, pairs):
    return lambda method="dpo": learning(make_config, pairs, method)


def made(config) -> Trainer:
    return assemble(config, build(config))


def test_the_better_clip_is_predicted_ever_better_than_the_worse(offline) -> None:
    trainer, ticks = made(offline()), []
    assert [offline(method).group_size for method in ("dpo", "rft")] == [2, 1]
    found = [trainer.step() for _ in range(12)]
    assert found[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["preference/lead"] > 0.05
    assert found[-1]["loss/policy"] < found[0]["loss/policy"]
    assert not [name for row in found for name in row if name.startswith(("reward/", "video/", "advantage/"))]
    three = replace(trainer.plan, groups=trainer.plan.groups[:1] * 3)
    assert trainer.score(None, three).groups.tolist() == [0, 0, 1, 1, 2, 2]
    trainer.clock.listen = lambda phase, *counts: phase == "update" and counts[0] and ticks.append(counts)
    trainer.step()
    assert ticks[-1] == (len(ticks), len(ticks)), "every pass was foreseen"


def test_latents_are_encoded_once_and_by_content(offline, pairs, monkeypatch) -> None:
    def learned() -> dict[str, Tensor]:
        trainer = made(offline())
        for _ in range(4):
            trainer.step()
        return weights_of(trainer)

    weights = learned()
    assert len(list((Path(offline().out) / LATENTS).rglob("*.safetensors"))) == 8
    with monkeypatch.context() as patch:
        patch.setattr(ToyModel, "to_latents", lambda *_: pytest.fail("encoded again"))
        assert same(weights, learned())
    write_mp4(pairs.parent / "win0.mp4", clip(150), 8.0)  # other content under the same name
    assert not same(weights, learned())


def test_rows_that_are_too_short_or_broken_are_left_out_and_named(offline, pairs) -> None:
    write_mp4(pairs.parent / "lose1.mp4", clip(60, frames=1), 8.0)
    (pairs.parent / "win2.mp4").write_bytes(b"no video")
    inputs = build(offline())
    assert [prompt.text for prompt in inputs.prompts] == ["a cat", "the sea"]
    found = inputs.examples
    assert [prompt for prompt, _ in found.skipped] == ["a red dog", "a bird"]
    assert "lose1.mp4 is too short: 1 frames at 8 fps, 2 at 8 fps take 2" in found.summary
    for name in ("lose0", "win3"):
        (pairs.parent / f"{name}.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match="none of the 4 rows can be used"):
        build(offline())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"win": "win0.mp4"}, "win and lose, or clip"),
        ({"clip": "win0.mp4"}, "learns from pairs"),
        ({"win": "win0.mp4", "lose": "none.mp4"}, "there is no clip"),
        ({"win": 3, "lose": "lose0.mp4"}, "must be the path of a clip"),
        ({"win": "win0.mp4", "lose": "lose0.mp4", "prompt": ""}, r"pairs\.jsonl.*1.*: the prompt is empty"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(row: dict, words: str, pairs) -> None:
    pairs.write_text(json.dumps({"prompt": "a", **row}))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_examples(pairs, pairs=True)


def test_a_folder_has_one_list_and_sft_takes_either_kind(pairs) -> None:
    (found,) = {len(prompt.clips) for prompt in load_examples(pairs.parent, pairs=True)}
    assert found == 2
    better = [[clip.name for clip in prompt.clips] for prompt in load_examples(pairs.parent, pairs=False)]
    assert better[:2] == [["win0.mp4"], ["win1.mp4"]]
    (pairs.parent / "clips.csv").write_text("prompt,clip,mood\na cat,lose0.mp4,glad\n")
    (one,) = load_examples(pairs.parent / "clips.csv", pairs=False)
    assert (one.clips[0].name, dict(one.metadata)) == ("lose0.mp4", {"mood": "glad"})
    (pairs.parent / "clips.jsonl").write_text("")
    with pytest.raises(ValueError, match="has both of"):
        load_examples(pairs.parent, pairs=True)
    with pytest.raises(ValueError, match=r"listed in a \.jsonl or \.csv"):
        load_examples("clips.txt", pairs=True)


def test_clips_follow_the_rhythm_of_the_format_and_are_cut_from_their_middle() -> None:
    four = replace(FORMAT, frames=4)
    assert [frames_at(fps, four) for fps in (8.0, 12.0, 24.0)] == [[0, 1, 2, 3], [0, 2, 3, 5], [0, 3, 6, 9]]
    wide = torch.zeros(2, 16, 64, 3, dtype=torch.uint8)
    wide[:, :, 28:36] = 255  # half of the middle square is white
    for cut in (fitted(wide, 8.0, FORMAT), fitted(wide.transpose(1, 2), 8.0, FORMAT).transpose(1, 2)):
        assert cut.shape == (2, 8, 8, 3)
        assert int(cut[:, :, 3:5].min()) > 240
        assert max(int(cut[:, :, :1].max()), int(cut[:, :, 7:].max())) < 15
    noise = clip(120, height=16, width=16)
    both = torch.cat([fitted(noise, 8.0, FORMAT), fitted(255 - noise, 8.0, FORMAT)])
    assert float(both.float().mean()) == pytest.approx(127.5, abs=0.1), "neither darker nor brighter"
    own = clip(120, frames=2)
    assert torch.equal(fitted(own, 8.0, FORMAT), own)
    with pytest.raises(ValueError, match="too short"):
        fitted(own[:1], 8.0, FORMAT)
    with pytest.raises(ValueError, match="uint8 F x H x W x 3"):
        fitted(own.float(), 8.0, FORMAT)


def test_a_clip_must_reach_the_last_frame_of_the_format() -> None:
    video = VideoSpec(frames=9, height=8, width=8, fps=8.0)
    assert (_shortness(9, 8.0, video), _shortness(17, 16.0, video)) == ("", "")
    assert _shortness(8, 8.0, video).endswith("take 9")
    assert _shortness(16, 16.0, video).endswith("take 17")
