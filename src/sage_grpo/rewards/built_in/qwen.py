"""How rewards on Qwen2-VL (VideoAlign, HPSv3) speak to it: the chat around a template, and batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import load_tokenizer
from sage_grpo.rewards.functions import RewardConfigError

PAD_TOKEN = "<|endoftext|>"
_BEFORE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
_BETWEEN, _AFTER = "<|vision_end|>", "<|im_end|>\n<|im_start|>assistant\n"


def qwen_tokenizer(base: str, rows: int, *, seen: str, read: Sequence[str]) -> Any:
    """The tokenizer of a base with `rows` embeddings; `seen` stands for what is looked at, `read` are new tokens at which scores are read."""
    tokenizer = load_tokenizer(base, rows)
    for token in (PAD_TOKEN, seen):
        if token not in tokenizer.get_vocab():
            raise RewardConfigError(f"{base} is no Qwen2-VL: its tokenizer does not know {token}.")
    tokenizer.add_tokens(list(read), special_tokens=True)
    return tokenizer


def chat_ids(tokenizer: Any, template: str, prompt: str, seen: str, count: int) -> list[int]:
    """Token ids of one sample, `count` of them for what is looked at; a prompt that holds a special token is refused."""
    for token in tokenizer.get_added_vocab():
        if token in prompt:
            raise ValueError(f"The prompt holds the special token {token}, which would change what is read.")
    text = _BEFORE + seen + _BETWEEN + template.replace("{text_prompt}", prompt) + _AFTER
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    number = tokenizer.convert_tokens_to_ids(seen)
    place = ids.index(number)
    return [*ids[:place], *[number] * count, *ids[place + 1 :]]


def batched_ids(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Token ids padded on the right, mask and positions.

    Positions are 0..L-1 on all three rope axes, not Qwen2-VL's own 3-D index: the models were trained so, because their authors hand over embeddings,
    from which no such index can be made.
    """
    pad, length = tokenizer.convert_tokens_to_ids(PAD_TOKEN), max(len(row) for row in rows)
    return {
        "input_ids": torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        "position_ids": torch.arange(length).expand(3, len(rows), length),
    }
