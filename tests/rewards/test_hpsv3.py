"""HPSv3 from a tiny random Qwen2-VL with the authors' head and names, against one frame at a time written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_reward_checkpoints import ENDING, INSTRUCTION, hpsv3_model, read_by_qwen

from sage_grpo.rewards.built_in.hpsv3 import Hpsv3
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import load_reward

PROMPTS = ["a red ball", "a much longer prompt about two blue squares"]

pytestmark = pytest.mark.usefixtures("small")


def clips() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(0, 256, (2, 8, 5, 7, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def test_scores_equal_the_reference(spec):
    """8 frames at 4 fps: four slices of half a second, but no more than three. A frame alone is resized to about so many pixels (both
    sides are rounded up) and shown twice."""
    options, videos = {**spec("hpsv3").options, "sample_fps": 2.0, "num_frames": 3}, clips()
    model, head, tokenizer = hpsv3_model(Path(options["base"]))
    scale = (16 * 28 * 28 / (40 * 56)) ** 0.5
    rows, columns = (int(-(-side * scale // 28) * 28) for side in (40, 56))

    def score(frame: torch.Tensor, prompt: str) -> float:
        picture = Image.fromarray(frame.numpy()).resize((columns, rows), Image.Resampling.BICUBIC)
        image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
        text = f"{INSTRUCTION.format(text_prompt=prompt)}{ENDING}"
        (hidden,) = read_by_qwen(model.model, tokenizer, image, text, ["<|Reward|>"])
        return head(hidden)[0].item()

    expected = [sum(score(clip[index], prompt) for index in (1, 4, 6)) / 3 for clip, prompt in zip(videos, PROMPTS)]
    ours = load_reward(replace(spec("hpsv3"), options=options))(videos, PROMPTS, 4.0)["HPSv3"]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-4, rtol=0)
    assert (ours[0] - ours[1]).abs() > 1e-3


def test_what_does_not_fit_is_refused(spec, tmp_path):
    options = spec("hpsv3").options
    state = load_file(options["checkpoint"])
    torch.save(state, tmp_path / "HPSv3.pth")
    torn = Path(options["checkpoint"]).read_bytes()[:-40]
    (tmp_path / "torn.safetensors").write_bytes(torn)
    for name, why in (("torn.safetensors", "damaged"), ("absent.safetensors", "does not exist")):
        with pytest.raises(RewardConfigError, match=why):
            Hpsv3(**{**options, "checkpoint": str(tmp_path / name)})
    for name, why in (("model.layers.1.mlp.up_proj.weight", "lacks"), ("rm_head.3.bias", "no whole head")):
        save_file({one: value for one, value in state.items() if one != name}, tmp_path / "model.safetensors")
        with pytest.raises(RewardConfigError, match=why):
            Hpsv3(**{**options, "checkpoint": str(tmp_path / "model.safetensors")})
    with pytest.raises(RewardConfigError, match="only safetensors"):
        Hpsv3(**{**options, "checkpoint": str(tmp_path / "HPSv3.pth")})


def test_prompts_cannot_move_the_place_that_is_read(spec):
    with pytest.raises(ValueError, match="special token"):
        load_reward(spec("hpsv3"))(clips(), ["a", "b <|Reward|>"], 8.0)
