"""CLIPScore, PickScore, aesthetic heads, HPSv2 and ImageReward against their formulas, on tiny random networks in their authors' names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from authors_layouts import (
    imagereward_raw,
    open_clip_image,
    open_clip_text,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_reward_checkpoints import write_clip
from tiny_rewards import hpsv2, imagereward

from sage_grpo.rewards.built_in.clip import Aesthetic, ClipScore, Hpsv2, PickScore, clip_pixels
from sage_grpo.rewards.built_in.imagereward import ImageReward
from sage_grpo.rewards.frames import CLIP_PIXELS
from sage_grpo.rewards.functions import RewardConfigError

PROMPTS = ["a red ball", "two squares", "a prompt that is far longer than the forty tokens of this tiny model" * 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


def clips(count: int = 3, frames: int = 8, height: int = 40, width: int = 56) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (count, frames, 3, height // 8, width // 8), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse.flatten(0, 1), (height, width), mode="bilinear")
    return smooth.round().to(torch.uint8).view(count, frames, 3, height, width).permute(0, 1, 3, 4, 2).contiguous()


def reference_cosines(folder: Path, videos: torch.Tensor, prompts: list[str], frames: list[int]) -> torch.Tensor:
    """B x frames cosines through PIL, the image processor and the model's own logits."""
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})
    rows = []
    for clip, prompt in zip(videos, prompts):
        images = [Image.fromarray(clip[index].numpy()) for index in frames]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        tokens = tokenizer([prompt], truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            logits = model(pixel_values=pixels, **tokens).logits_per_image[:, 0]
        rows.append(logits / model.logit_scale.exp())
    return torch.stack(rows)


FRAMES_AT_2 = [2, 6]  # 8 frames at 8 fps: one second, two slices, their centres


def test_clipscore_is_the_clamped_and_scaled_cosine(folder):
    videos = clips()
    cosine = reference_cosines(folder, videos, ["A photo depicts " + prompt for prompt in PROMPTS], FRAMES_AT_2)
    ours = ClipScore(model=str(folder))(videos, PROMPTS, 8.0)["CLIPScore"]
    torch.testing.assert_close(ours, 2.5 * cosine.clamp(min=0).mean(dim=1), atol=5e-3, rtol=0)
    plain = ClipScore(model=str(folder), scale=1.0, clamp=False, prefix="")(videos, PROMPTS, 8.0)["CLIPScore"]
    expected = reference_cosines(folder, videos, PROMPTS, FRAMES_AT_2).mean(dim=1)
    torch.testing.assert_close(plain, expected, atol=2e-3, rtol=0)
    assert expected.std() > 0.01  # the reference tells the clips apart
    pick = PickScore(model=str(folder))(videos, PROMPTS, 8.0)["PickScore"]
    torch.testing.assert_close(pick, expected / 0.07, atol=3e-2, rtol=0)  # exp of CLIP's initial logit scale
    divided = PickScore(model=str(folder), divide_by=26.0)(videos, PROMPTS, 8.0)["PickScore"]
    torch.testing.assert_close(divided, pick / 26)
    with pytest.raises(RewardConfigError, match="divide_by must be positive, got 0"):
        PickScore(model=str(folder), divide_by=0)


@pytest.mark.parametrize("size", [(40, 56), (16, 30), (90, 31)])
def test_padding_keeps_the_whole_picture_and_adds_black(size):
    """As HPSv2's authors: the longest edge fits, and the rest is black, half on each side. Floats are resized in one pass, so that
    nothing is rounded to grey levels and nothing is cut to 0..1 where the cubic overshoots."""
    height, width = size
    coarse = torch.randint(0, 2, (2, 12, 12, 3), generator=torch.Generator().manual_seed(2)).to(torch.uint8) * 255
    frames = coarse.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)[:, :height, :width]
    scale = 30 / max(size)
    rows, columns = round(height * scale), round(width * scale)
    down, across = cubic_weights(height, rows), cubic_weights(width, columns)
    picture = np.einsum("rh,nhwc,kw->nrkc", down, frames.numpy() / 255, across)
    canvas = np.zeros((2, 30, 30, 3))
    top, left = (30 - rows) // 2, (30 - columns) // 2
    canvas[:, top : top + rows, left : left + columns] = picture
    expected = ((canvas - np.array(CLIP_PIXELS[0])) / np.array(CLIP_PIXELS[1])).transpose(0, 3, 1, 2)
    assert np.abs(clip_pixels(frames, 30, "pad").double().numpy() - expected).max() < 1e-4  # a grey level is 1.5e-2
    if (rows, columns) != size:
        assert picture.min() < -0.01
        assert picture.max() > 1.01


def cubic_weights(before: int, after: int) -> np.ndarray:
    """after x before: the antialiased cubic filter (a = -1/2), widened by the factor of a reduction, from its definition."""
    ratio = before / after
    wide = max(ratio, 1.0)
    centres = (np.arange(after) + 0.5) * ratio
    distance = np.abs((np.arange(before) + 0.5)[None] - centres[:, None]) / wide
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("kind", "left"), [(ClipScore, 8), (Aesthetic, 8), (PickScore, 7)])
def test_an_odd_rest_of_the_crop_goes_where_each_scores_authors_put_it(kind, left, folder, tmp_path):
    """45 columns of which 30 are shown: torchvision's 7.5 is 8, transformers' is 7. The short edge fits, so that nothing is resized."""
    files = {"model": str(folder)}
    if kind is Aesthetic:
        files["head"] = str(tmp_path / "head.safetensors")
        save_file({"layers.0.weight": torch.arange(16.0).view(1, 16)}, files["head"])
    files |= {"clamp": False} if kind is ClipScore else {}
    generator = torch.Generator().manual_seed(4)
    videos = torch.randint(0, 256, (1, 2, 30, 45, 3), generator=generator, dtype=torch.uint8)
    reward, score = kind(**files), {}
    (part,) = reward.names
    for first in (7, 8):
        score[first] = reward(videos[:, :, :, first : first + 30], PROMPTS[:1], 2.0)[part]
    ours = reward(videos, PROMPTS[:1], 2.0)[part]
    torch.testing.assert_close(ours, score[left], atol=1e-6, rtol=1e-6)
    assert (ours - score[15 - left]).abs() > 1e-4


def test_aesthetic_head_applies_the_layers_in_order(folder, tmp_path):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(16, 12), torch.nn.Linear(12, 1)
    state = {"layers.2.weight": first.weight, "layers.2.bias": first.bias}
    state |= {"layers.10.weight": second.weight, "layers.10.bias": second.bias}
    save_file({name: value.detach() for name, value in state.items()}, tmp_path / "head.safetensors")
    reward = Aesthetic(model=str(folder), head=str(tmp_path / "head.safetensors"))
    embedding = reward._encoder.frames(clips(), FRAMES_AT_2)
    expected = second(first(embedding)).squeeze(-1).mean(dim=1)
    torch.testing.assert_close(reward(clips(), PROMPTS, 8.0)["Aesthetic"], expected.detach())
    save_file({"layers.0.weight": torch.zeros(1, 7)}, tmp_path / "wrong.safetensors")
    with pytest.raises(RewardConfigError, match="does not fit"):
        Aesthetic(model=str(folder), head=str(tmp_path / "wrong.safetensors"))


BOTH = ["a red ball", "two squares that move"]


@pytest.fixture(scope="module")
def image_reward(tmp_path_factory) -> dict[str, str]:
    return imagereward(tmp_path_factory.mktemp("imagereward")).options


@pytest.fixture(scope="module")
def hps(tmp_path_factory) -> str:
    return hpsv2(tmp_path_factory.mktemp("hps")).options["checkpoint"]


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


def test_hpsv2_is_the_cosine_of_the_padded_picture_and_the_prompt(base, hps):
    from transformers import AutoTokenizer

    state, tokenizer, videos = load_file(hps), AutoTokenizer.from_pretrained(base), clips(2)
    expected = []
    for clip, prompt in zip(videos, BOTH):
        image = open_clip_image(state, clip_pixels(clip[FRAMES_AT_2], 30, "pad"))
        text = open_clip_text(state, tokenizer([prompt], return_tensors="pt")["input_ids"])
        expected.append((image @ text.T).mean())
    ours = Hpsv2(checkpoint=str(hps), base=str(base))(videos, BOTH, 8.0)["HPSv2"]
    torch.testing.assert_close(ours, torch.stack(expected), atol=2e-6, rtol=0)
    assert (ours[0] - ours[1]).abs() > 1e-3


def test_imagereward_reads_the_prompt_while_it_looks_at_the_frames(image_reward):
    from transformers import AutoTokenizer

    state, videos = load_file(image_reward["checkpoint"]), clips(2)
    tokenizer = AutoTokenizer.from_pretrained(image_reward["tokenizer"])
    expected = []
    for clip, prompt in zip(videos, BOTH):
        tokens = tokenizer([prompt], padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        ids, mask = (tokens[name].expand(2, -1) for name in ("input_ids", "attention_mask"))
        raw = imagereward_raw(state, clip_pixels(clip[FRAMES_AT_2], 24), ids, mask)
        expected.append(((raw - 0.16717362830052426) / 1.0333394966054072).mean())
    ours = ImageReward(**image_reward)(videos, BOTH, 8.0)["ImageReward"]
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert (ours[0] - ours[1]).abs() > 1e-4


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


def test_long_prompts_are_cut(image_reward):
    reward, long = ImageReward(**image_reward), "a b c d e " * 10
    cut = reward(clips(2)[:1], [long], 8.0)["ImageReward"]
    assert torch.equal(cut, reward(clips(2)[:1], [long + "z z z"], 8.0)["ImageReward"])
