"""HPSv2 and ImageReward from tiny weights in their authors' names, against plain forward passes over those names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from authors_layouts import (
    imagereward_raw,
    open_clip_image,
    open_clip_state,
    open_clip_text,
    write_bert_tokenizer,
    write_imagereward,
)
from safetensors.torch import load_file, save_file
from tiny_reward_checkpoints import write_clip

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.clip import Hpsv2, clip_pixels
from sage_grpo.rewards.built_in.imagereward import ImageReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec

PROMPTS = ["a red ball", "two squares that move"]
CHOSEN = [2, 6]  # 8 frames at 8 fps: the centres of two slices of half a second


def clips() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (2 * 8, 3, 5, 7), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse, (40, 56), mode="bilinear")
    return smooth.round().to(torch.uint8).view(2, 8, 3, 40, 56).permute(0, 1, 3, 4, 2).contiguous()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Configuration and tokenizer; the weights beside them are others. GELU as in ViT-H/14, not CLIP's quick one."""
    import json

    folder = write_clip(tmp_path_factory.mktemp("base"))
    config = json.loads((folder / "config.json").read_text())
    for tower in ("text_config", "vision_config"):
        config[tower]["hidden_act"] = "gelu"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()  # only configuration and tokenizer are read
    return folder


@pytest.fixture(scope="module")
def hps(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hps") / "hps.safetensors"
    save_file(open_clip_state(), path)
    return path


@pytest.fixture(scope="module")
def image_reward(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("imagereward")
    write_imagereward(folder)
    write_bert_tokenizer(folder / "bert")
    return {
        "checkpoint": str(folder / "imagereward.safetensors"),
        "config": str(folder / "med_config.json"),
        "tokenizer": str(folder / "bert"),
    }


def test_hpsv2_is_the_cosine_of_the_padded_picture_and_the_prompt(base, hps):
    from transformers import AutoTokenizer

    state, tokenizer, videos = load_file(hps), AutoTokenizer.from_pretrained(base), clips()
    expected = []
    for clip, prompt in zip(videos, PROMPTS):
        image = open_clip_image(state, clip_pixels(clip[CHOSEN], 30, "pad"))
        text = open_clip_text(state, tokenizer([prompt], return_tensors="pt")["input_ids"])
        expected.append((image @ text.T).mean())
    ours = Hpsv2(checkpoint=str(hps), base=str(base))(videos, PROMPTS, 8.0)["HPSv2"]
    torch.testing.assert_close(ours, torch.stack(expected), atol=2e-6, rtol=0)
    assert (ours[0] - ours[1]).abs() > 1e-3


def test_imagereward_reads_the_prompt_while_it_looks_at_the_frames(image_reward):
    from transformers import AutoTokenizer

    state, videos = load_file(image_reward["checkpoint"]), clips()
    tokenizer = AutoTokenizer.from_pretrained(image_reward["tokenizer"])
    expected = []
    for clip, prompt in zip(videos, PROMPTS):
        tokens = tokenizer([prompt], padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        ids, mask = (tokens[name].expand(2, -1) for name in ("input_ids", "attention_mask"))
        raw = imagereward_raw(state, clip_pixels(clip[CHOSEN], 24), ids, mask)
        expected.append(((raw - 0.16717362830052426) / 1.0333394966054072).mean())
    ours = ImageReward(**image_reward)(videos, PROMPTS, 8.0)["ImageReward"]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert (ours[0] - ours[1]).abs() > 1e-4


def test_imagereward_cuts_the_centre_out_as_torchvision_does(image_reward):
    """39 columns of which 24 are shown: 7.5 is rounded to 8. The short edge fits, so that nothing is resized."""
    generator = torch.Generator().manual_seed(4)
    videos = torch.randint(0, 256, (1, 2, 24, 39, 3), generator=generator, dtype=torch.uint8)
    reward = ImageReward(**image_reward)
    whole, down, even = (
        reward(part, PROMPTS[:1], 2.0)["ImageReward"] for part in (videos, videos[:, :, :, 7:31], videos[:, :, :, 8:32])
    )
    torch.testing.assert_close(whole, even, atol=1e-6, rtol=1e-6)
    assert (whole - down).abs() > 1e-4


def test_prompts_and_frames_matter_batches_do_not_and_long_prompts_are_cut(image_reward, monkeypatch):
    reward, videos = ImageReward(**image_reward), clips()
    whole = reward(videos, PROMPTS, 8.0)["ImageReward"]
    assert (whole - reward(videos, PROMPTS[::-1], 8.0)["ImageReward"]).abs().min() > 1e-5
    monkeypatch.setattr("sage_grpo.rewards.built_in.imagereward.FRAMES_A_PASS", 3)
    torch.testing.assert_close(reward(videos, PROMPTS, 8.0)["ImageReward"], whole, atol=1e-5, rtol=1e-5)
    long = "a b c d e " * 10
    cut = reward(videos[:1], [long], 8.0)["ImageReward"]
    assert torch.equal(cut, reward(videos[:1], [long + "z z z"], 8.0)["ImageReward"])


@pytest.mark.parametrize("name", ["hpsv2", "imagereward"])
def test_the_options_say_which_frames_are_looked_at(name, base, hps, image_reward):
    """Scores are those of a clip that has just these frames."""
    kind, files = {
        "hpsv2": (Hpsv2, {"checkpoint": str(hps), "base": str(base)}),
        "imagereward": (ImageReward, image_reward),
    }[name]
    plain, videos = kind(**files), clips()
    (part,) = plain.names
    chosen = kind(**files, sample_fps=4.0, num_frames=3)(videos, PROMPTS, 8.0)[part]
    alone = plain(videos[:, [1, 4, 6]], PROMPTS, 2.0)[part]  # the centres of three slices; at 2 fps every frame counts
    torch.testing.assert_close(chosen, alone, atol=1e-5, rtol=0)
    assert (chosen - plain(videos, PROMPTS, 8.0)[part]).abs().max() > 1e-4


@pytest.mark.parametrize("reward", ["hpsv2", "imagereward"])
def test_pickles_damaged_and_incomplete_files_are_refused(reward, base, hps, image_reward, tmp_path):
    good = {"checkpoint": str(hps), "base": str(base)} if reward == "hpsv2" else image_reward
    kind = {"hpsv2": Hpsv2, "imagereward": ImageReward}[reward]

    def refused(path: Path, why: str) -> None:
        with pytest.raises(RewardConfigError, match=why):
            kind(**{**good, "checkpoint": str(path)})

    torch.save(load_file(good["checkpoint"]), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "only safetensors.*docs/rewards.md")
    refused(tmp_path / "absent.safetensors", "does not exist")
    (tmp_path / "torn.safetensors").write_bytes(Path(good["checkpoint"]).read_bytes()[:-40])
    refused(tmp_path / "torn.safetensors", "damaged")
    state = load_file(good["checkpoint"])
    name = "transformer.resblocks.1.mlp.c_fc.bias" if reward == "hpsv2" else "blip.visual_encoder.blocks.1.norm1.bias"
    save_file({key: value for key, value in state.items() if key != name}, tmp_path / "lacks.safetensors")
    refused(tmp_path / "lacks.safetensors", "lacks")
    save_file({**state, name: torch.zeros(3)}, tmp_path / "shape.safetensors")
    refused(tmp_path / "shape.safetensors", "another shape")
    more = name.replace(".1.", ".1.strange.")
    save_file({**state, more: torch.zeros(3)}, tmp_path / "more.safetensors")
    refused(tmp_path / "more.safetensors", "also holds")


def test_a_head_or_configuration_that_does_not_fit_is_refused(image_reward, tmp_path):
    state = load_file(image_reward["checkpoint"])
    save_file({n: v for n, v in state.items() if n != "mlp.layers.4.bias"}, tmp_path / "a.safetensors")
    with pytest.raises(RewardConfigError, match="no whole head"):
        ImageReward(**{**image_reward, "checkpoint": str(tmp_path / "a.safetensors")})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardConfigError, match=r"not a med_config.json \(KeyError"):
        ImageReward(**{**image_reward, "config": str(tmp_path / "config.json")})
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(RewardConfigError, match="not an ImageReward"):
        ImageReward(**{**image_reward, "checkpoint": str(tmp_path / "b.safetensors")})


def test_they_compose_by_name(base, hps, image_reward):
    specs = [
        RewardSpec(name="hpsv2", options={"checkpoint": str(hps), "base": str(base)}),
        RewardSpec(name="imagereward", options=image_reward),
    ]
    composite = CompositeReward(specs)
    assert composite.names == ("HPSv2", "ImageReward")
    assert composite.try_out("a ball") == ""
    assert composite.score(clips(), PROMPTS, 8.0)[0].valid.all()
