"""HPSv3 from a tiny random Qwen2-VL with the authors' head and names, against one frame at a time written out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_reward_checkpoints import naive_patches, qwen_tokenizer, write_qwen_base

from sage_grpo.rewards.built_in.hpsv3 import Hpsv3
from sage_grpo.rewards.frames import CLIP_PIXELS
from sage_grpo.rewards.functions import RewardConfigError

INSTRUCTION = "\nJudge the picture.\nTextual prompt - {text_prompt}\n\n\n"
ENDING = "\nThe rating: <|Reward|>\n\nEND\n"
PROMPTS = ["a red ball", "a much longer prompt about two blue squares"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_qwen_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("template") / "data_collator_qwen.py"
    source = f"raise SystemExit('never executed')\nINSTRUCTION = {INSTRUCTION!r}\n"
    path.write_text(f"{source}prompt_with_special_token = {ENDING!r}\nother = f'{{x}}'\n")
    return path


@pytest.fixture(scope="module")
def trained(base):
    """The model as transformers has it, its head and its tokenizer."""
    from transformers import Qwen2VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()
    model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Dropout(0.05), torch.nn.Linear(24, 16), torch.nn.ReLU(),
        torch.nn.Linear(16, 2),
    ).eval()  # fmt: skip
    return model, head, tokenizer


def authors_state(trained) -> dict[str, torch.Tensor]:
    """In the names of transformers 4.45."""
    model, head, _ = trained
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    state = {re.sub(r"^model\.language_model\.", "model.", name): value for name, value in state.items()}
    state = {re.sub(r"^model\.visual\.", "visual.", name): value for name, value in state.items()}
    return state | {f"rm_head.{name}": value.detach().clone() for name, value in head.state_dict().items()}


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hpsv3") / "HPSv3.safetensors"
    save_file(authors_state(trained), path)
    return path


def clips() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (2, 8, 5, 7, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def reference(trained, frame: torch.Tensor, prompt: str, pixels: int) -> float:
    """One frame alone: resized to about so many pixels, shown twice, flat positions, the head at the reward token."""
    model, head, tokenizer = trained
    scale = (pixels / (40 * 56)) ** 0.5  # the frames are smaller than that: both sides are rounded up
    rows, columns = (-(-side * scale // 28) * 28 for side in (40, 56))
    picture = Image.fromarray(frame.numpy()).resize((int(columns), int(rows)), Image.Resampling.BICUBIC)
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CLIP_PIXELS)
    image = (image - mean) / std
    grid = (1, int(rows) // 14, int(columns) // 14)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        f"{'<|image_pad|>' * (grid[1] * grid[2] // 4)}<|vision_end|>"
        f"{INSTRUCTION.format(text_prompt=prompt)}{ENDING}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        hidden = model.model(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, 1, -1),
            pixel_values=naive_patches(image.expand(2, -1, -1, -1)),
            image_grid_thw=torch.tensor([grid]),
            use_cache=False,
        ).last_hidden_state[0]
        place = ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|Reward|>"))
        return head(hidden[place])[0].item()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A sixteenth of the real size, to be quick."""
    monkeypatch.setattr("sage_grpo.rewards.built_in.hpsv3.PIXELS", 16 * 28 * 28)


def options(checkpoint: Path, base: Path, template: Path) -> dict[str, str]:
    return {"checkpoint": str(checkpoint), "base": str(base), "template": str(template), "dtype": "float32"}


def test_scores_equal_the_reference(checkpoint, base, template, trained):
    # 8 frames at 4 fps: four slices of half a second, but no more than three
    reward, videos = Hpsv3(**options(checkpoint, base, template), sample_fps=2.0, num_frames=3), clips()
    expected = [
        sum(reference(trained, clip[index], prompt, 16 * 28 * 28) for index in (1, 4, 6)) / 3
        for clip, prompt in zip(videos, PROMPTS)
    ]
    ours = reward(videos, PROMPTS, 4.0)["HPSv3"]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-4, rtol=0)
    assert (ours[0] - ours[1]).abs() > 1e-3


def test_what_does_not_fit_is_refused(base, template, trained, tmp_path):
    state = authors_state(trained)

    def refused(changed: dict[str, torch.Tensor], why: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(RewardConfigError, match=why):
            Hpsv3(**options(tmp_path / "model.safetensors", base, template))

    refused({name: value for name, value in state.items() if "layers.1.mlp.up_proj" not in name}, "lacks")
    refused({name: value for name, value in state.items() if name != "rm_head.3.bias"}, "no whole head")
    torch.save(state, tmp_path / "HPSv3.pth")
    with pytest.raises(RewardConfigError, match="only safetensors"):
        Hpsv3(**options(tmp_path / "HPSv3.pth", base, template))


def test_prompts_cannot_move_the_place_that_is_read(checkpoint, base, template):
    reward = Hpsv3(**options(checkpoint, base, template))
    with pytest.raises(ValueError, match="special token"):
        reward(clips(), ["a", "b <|Reward|>"], 8.0)
