"""Inputs of rewards on Qwen2-VL (VideoAlign, HPSv3): their authors' templates and weights, the chat around a template, pictures as patches."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import load_tokenizer
from sage_grpo.rewards.functions import RewardConfigError, check_known

PATCH, MERGE, TEMPORAL = 14, 2, 2
FACTOR = PATCH * MERGE
_WEIGHT_NAMES = (
    (r"^base_model\.model\.", ""),
    (r"\.(modules_to_save\.default|base_layer)\.", "."),
    (r"\.(lora_[AB])\.default\.", r".\1."),
    (r"^model\.(language_model|visual)\.", r"\1."),
    (r"^model\.", "language_model."),
)
"""The authors' names (peft around transformers 4) in transformers 5's, relative to Qwen2VLModel."""
PAD_TOKEN = "<|endoftext|>"
_BEFORE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
_BETWEEN, _AFTER = "<|vision_end|>", "<|im_end|>\n<|im_start|>assistant\n"


class Chat:
    """A template around prompts, with videos or images in front of it; scores are read at the new tokens `read`."""

    def __init__(
        self, base: str, rows: int, template: str, kind: Literal["video", "image"], read: Sequence[str]
    ) -> None:
        """base: folder or hub name of the tokenizer, of a model with `rows` embeddings."""
        self.tokenizer = load_tokenizer(base, rows)
        self._template, self._kind, self._seen = template, kind, f"<|{kind}_pad|>"
        for token in (PAD_TOKEN, self._seen):
            if token not in self.tokenizer.get_vocab():
                raise RewardConfigError(f"{base} is not a Qwen2-VL: its tokenizer does not know {token}.")
        self.tokenizer.add_tokens(list(read), special_tokens=True)
        self.read_ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(read)))

    def batch(self, prompts: Sequence[str], pictures: Sequence[Tensor]) -> dict[str, Tensor]:
        """Token ids padded on the right, mask, positions, patches and grids of samples, each of normalized frames T x 3 x H x W.

        Positions are 0..L-1 on all three rope axes, not Qwen2-VL's own 3-D index: the models were trained so, because their authors hand over
        embeddings, from which no such index can be made.
        """
        pairs = [patchify(frames) for frames in pictures]
        rows = [self._ids(prompt, math.prod(grid) // MERGE**2) for prompt, (_, grid) in zip(prompts, pairs)]
        pad, length = self.tokenizer.convert_tokens_to_ids(PAD_TOKEN), max(len(row) for row in rows)
        return {
            "input_ids": torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
            "position_ids": torch.arange(length).expand(3, len(rows), length),
            "pixel_values_videos" if self._kind == "video" else "pixel_values": torch.cat([one for one, _ in pairs]),
            f"{self._kind}_grid_thw": torch.tensor([grid for _, grid in pairs]),
        }

    def _ids(self, prompt: str, count: int) -> list[int]:
        """Token ids of one sample, `count` of them for the pictures; a prompt that holds a special token is refused."""
        for token in self.tokenizer.get_added_vocab():
            if token in prompt:
                raise ValueError(f"The prompt holds the special token {token}, which would change what is read.")
        text = _BEFORE + self._seen + _BETWEEN + self._template.replace("{text_prompt}", prompt) + _AFTER
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        number = self.tokenizer.convert_tokens_to_ids(self._seen)
        place = ids.index(number)
        return [*ids[:place], *[number] * count, *ids[place + 1 :]]


def read_template(path: Path, strings: Sequence[str], tokens: Sequence[str], source: str) -> str:
    """The template: a text file, or joined strings of the authors' Python file, which is parsed, never run. It holds the tokens once, in their order.

    source: the file to copy if `path` does not exist.
    """
    if not path.is_file():
        raise RewardConfigError(f"The prompt template {path} does not exist. Copy {source} (docs/rewards.md).")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        constants = {
            target.id: node.value.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        check_known(strings, constants, f"{path} has no string")
        text = "".join(constants[name] for name in strings)
    for token in (*tokens, "{text_prompt}"):
        if text.count(token) != 1:
            raise RewardConfigError(f"The template {path} must hold {token} once, it does {text.count(token)} times.")
    order = [text.index(token) for token in tokens]
    if order != sorted(order):
        raise RewardConfigError(f"The template {path} must hold {', '.join(tokens)} in this order.")
    return text


def transformers_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' weights under transformers' names, without peft's untouched copies beside modules_to_save. Unknown names are kept, so that
    loading refuses them."""
    result = {}
    for name, value in state.items():
        if ".original_module." not in name:
            for pattern, replacement in _WEIGHT_NAMES:
                name = re.sub(pattern, replacement, name)
            result[name] = value
    return result


def target_size(height: int, width: int, *, max_pixels: int, min_pixels: int) -> tuple[int, int]:
    """Multiples of 28 near the frame's size; the maximum is tested first, then the minimum."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"The aspect ratio of {height} x {width} is beyond 200.")
    rows, columns = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (math.floor(side / scale / FACTOR) * FACTOR for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / FACTOR) * FACTOR for side in (height, width))
    if rows < FACTOR or columns < FACTOR:
        raise ValueError(f"A frame of {height} x {width} is too narrow for patches of {FACTOR} pixels.")
    return rows, columns


def patchify(frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """T x 3 x H x W to patches in Qwen2-VL's order (2 x 2 neighbors together), and the grid (t, h, w)."""
    if frames.shape[0] % TEMPORAL:
        frames = torch.cat([frames, frames[-1:]])
    t, h, w = frames.shape[0] // TEMPORAL, frames.shape[2] // PATCH, frames.shape[3] // PATCH
    grid = frames.view(t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    # to (t, h block, w block, h in block, w in block, channel, frame in pair, pixel row, pixel column)
    patches = grid.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * TEMPORAL * PATCH * PATCH)
    return patches, (t, h, w)
