"""CLIPScore, PickScore, aesthetic heads, and HPSv2 against their formulas, on tiny random networks in their authors' names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sage_grpo.rewards.built_in.clip import Aesthetic, ClipScore, Hpsv2, PickScore, clip_pixels
from sage_grpo.rewards.frames import CLIP_PIXELS
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import load_reward

PROMPTS = ["a red ball", "a prompt that is far longer than the forty tokens of this tiny model" * 2]
BOTH = ["a red ball", "two squares that move"]


def clips(count: int = 2, frames: int = 8, height: int = 40, width: int = 56) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (count, frames, 3, height // 8, width // 8), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse.flatten(0, 1), (height, width), mode="bilinear")
    return smooth.round().to(torch.uint8).view(count, frames, 3, height, width).permute(0, 1, 3, 4, 2).contiguous()


FRAMES_AT_2 = [2, 6]  # 8 frames at 8 fps: one second, two slices, their centers


def test_clipscore_is_the_clamped_and_scaled_cosine(clip_model):
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model, tokenizer = CLIPModel.from_pretrained(clip_model).eval(), AutoTokenizer.from_pretrained(clip_model)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})
    videos = clips()

    def cosines(prefix: str) -> torch.Tensor:
        rows = []
        for clip, prompt in zip(videos, PROMPTS):
            images = [Image.fromarray(clip[index].numpy()) for index in FRAMES_AT_2]
            pixels = processor(images, return_tensors="pt")["pixel_values"]
            tokens = tokenizer([prefix + prompt], truncation=True, max_length=40, return_tensors="pt")
            with torch.no_grad():
                logits = model(pixel_values=pixels, **tokens).logits_per_image[:, 0]
            rows.append(logits / model.logit_scale.exp())
        return torch.stack(rows)

    ours = ClipScore(model=clip_model)(videos, PROMPTS, 8.0)["CLIPScore"]
    assert len(ClipScore(model=clip_model).frames_read(100, 8.0)) == 16  # of 25 at two a second
    expected = 2.5 * cosines("A photo depicts ").clamp(min=0).mean(dim=1)
    torch.testing.assert_close(ours, expected, atol=5e-3, rtol=0)
    expected = cosines("").mean(dim=1)
    assert expected.std() > 0.01  # the reference tells the clips apart
    pick = PickScore(model=clip_model)(videos, PROMPTS, 8.0)["PickScore"]
    torch.testing.assert_close(pick, expected / 0.07, atol=3e-2, rtol=0)  # exp of CLIP's initial logit scale


@pytest.mark.parametrize("size", [(40, 53), (16, 30), (90, 31), (90, 1)])
def test_padding_keeps_the_whole_picture_and_adds_black(size):
    """As HPSv2's authors: the longest edge fits, and the rest is black, half on each side. Floats are resized in one pass, so that
    nothing is rounded to gray levels and nothing is cut to 0..1 where the cubic overshoots."""
    height, width = size
    coarse = torch.randint(0, 2, (2, 12, 12, 3), generator=torch.Generator().manual_seed(2)).to(torch.uint8) * 255
    frames = coarse.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)[:, :height, :width]
    scale = 30 / max(size)
    rows, columns = round(height * scale), max(1, round(width * scale))
    down, across = cubic_weights(height, rows), cubic_weights(width, columns)
    picture = np.einsum("rh,nhwc,kw->nrkc", down, frames.numpy() / 255, across)
    canvas = np.zeros((2, 30, 30, 3))
    top, left = (30 - rows) // 2, (30 - columns) // 2
    canvas[:, top : top + rows, left : left + columns] = picture
    expected = ((canvas - np.array(CLIP_PIXELS[0])) / np.array(CLIP_PIXELS[1])).transpose(0, 3, 1, 2)
    assert np.abs(clip_pixels(frames, 30, "pad").double().numpy() - expected).max() < 1e-4  # a gray level is 1.5e-2
    if (rows, columns) != size:
        assert picture.min() < -0.01
        assert picture.max() > 1.01


def cubic_weights(before: int, after: int) -> np.ndarray:
    """after x before: the antialiased cubic filter (a = -1/2), widened by the factor of a reduction, from its definition."""
    ratio = before / after
    centres = (np.arange(after) + 0.5) * ratio
    distance = np.abs((np.arange(before) + 0.5)[None] - centres[:, None]) / max(ratio, 1.0)
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("name", "left"), [("clip", 8), ("aesthetic", 8), ("pickscore", 7)])
def test_an_odd_rest_of_the_crop_goes_where_each_scores_authors_put_it(name, left, spec):
    """45 columns of which 30 are shown: torchvision's 7.5 is 8, transformers' is 7. The short edge fits, so that nothing is resized."""
    generator = torch.Generator().manual_seed(4)
    videos = torch.randint(0, 256, (1, 2, 30, 45, 3), generator=generator, dtype=torch.uint8)
    reward = load_reward(spec(name))
    shown = [videos, *(videos[:, :, :, first : first + 30] for first in (left, 15 - left))]
    ours, wanted, other = (next(iter(reward(one, PROMPTS[:1], 2.0).values())) for one in shown)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)
    assert (ours - other).abs() > 1e-4


def test_aesthetic_head_applies_the_layers_in_order(clip_model, tmp_path):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(16, 12), torch.nn.Linear(12, 1)
    state = {"layers.2.weight": first.weight, "layers.2.bias": first.bias}
    state |= {"layers.10.weight": second.weight, "layers.10.bias": second.bias}
    save_file({name: value.detach() for name, value in state.items()}, tmp_path / "head.safetensors")
    reward = Aesthetic(model=clip_model, head=str(tmp_path / "head.safetensors"))
    embedding = reward.frames(clips(), 8.0)
    expected = second(first(embedding)).squeeze(-1).mean(dim=1)
    torch.testing.assert_close(reward(clips(), PROMPTS, 8.0)["Aesthetic"], expected.detach())
    save_file({"layers.0.weight": torch.zeros(1, 7), "layers.0.bias": torch.zeros(1)}, tmp_path / "wrong.safetensors")
    with pytest.raises(RewardConfigError, match="does not fit"):
        Aesthetic(model=clip_model, head=str(tmp_path / "wrong.safetensors"))


def test_hpsv2_is_the_plain_cosine_of_the_whole_picture(clip_model):
    reward = PickScore(model=clip_model, fit="pad")
    plain = reward(clips(), BOTH, 8.0)["PickScore"] / reward.model.logit_scale.exp()
    torch.testing.assert_close(Hpsv2(model=clip_model)(clips(), BOTH, 8.0)["HPSv2"], plain)
