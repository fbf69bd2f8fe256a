"""The tokenizer of the miniature: a genuine Qwen2Tokenizer in which every word of the world is one token.

HunyuanVideo15Pipeline drops the first 108 tokens, where its system message sits. The chat template here writes a
prefix of exactly that length whatever the message says, so what remains is one token a word and a closing token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

PREFIX_LENGTH = 108
"""Tokens that the pipeline drops (its `prompt_template_encode_start_idx`)."""

PAD, START, END, SYSTEM = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|system|>"

# The prompt is lowered and gets a leading blank, so that a word is the same token wherever it stands.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ '" + START + "' + '" + SYSTEM + "' * " + str(PREFIX_LENGTH - 2) + " }}"
    "{% elif message['role'] == 'user' %}"
    "{% set words = message['content'] | trim | lower %}"
    "{{ '" + START + "' }}{% if words %}{{ ' ' + words }}{% endif %}{{ '" + END + "' }}"
    "{% endif %}"
    "{% endfor %}"
)


def build_tokenizer(words: Sequence[str]) -> Qwen2Tokenizer:
    """A byte-level Qwen2Tokenizer whose merges spell exactly these words; other words fall apart into bytes.

    Each word becomes a chain of merges that starts at its leading blank. No merge starts elsewhere, so a chain
    cannot be broken by another one and the order of the merges does not matter.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in sorted(words):
        if not (word.isascii() and word.isalpha() and word.islower()):
            raise ValueError(f"The tokenizer takes lower-case ASCII words, got {word!r}.")
        piece = "Ġ"
        for letter in word:
            if piece + letter not in vocabulary:
                merges.append((piece, letter))
                vocabulary[piece + letter] = len(vocabulary)
            piece += letter
    for token in (PAD, START, END, SYSTEM):
        vocabulary[token] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, unk_token=PAD, eos_token=PAD, pad_token=PAD, padding_side="right"
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (START, END, SYSTEM)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prefix_ids(tokenizer: Qwen2Tokenizer) -> list[int]:
    """The constant tokens before every prompt."""
    start, system = tokenizer.convert_tokens_to_ids([START, SYSTEM])
    return [start, *[system] * (PREFIX_LENGTH - 2), start]


def prompt_ids(tokenizer: Qwen2Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens after the prefix, unpadded: what the pipeline's encoder sees of every prompt."""
    texts = [prompt.strip().lower() for prompt in prompts]
    return tokenizer([f" {text}{END}" if text else END for text in texts])["input_ids"]
