"""Networks with random weights and tokenizers without training data, as files: a rehearsal needs their sizes, not their meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SHARD = 2 << 30  # bytes of a file, of which two copies are in memory
PERIOD = (1 << 22) + 15  # no multiple of a width, so that the rows of a matrix differ
KNOWN = 0.99
"""Share of an embedding's rows that a tokenizer knows, as in published ones."""
END = "<|endoftext|>"


class RandomNumbers:
    """Normal numbers for billions of weights, read in a circle from one drawn buffer: as fast as a copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._place = dtype, 0
        self._numbers = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0))
        self._scaled: dict[int, Tensor] = {}

    def weights(self, name: str, like: Tensor) -> Tensor:
        """A tensor's values, with which every layer keeps the size of its signal: norms are 1, biases and means 0."""
        inputs = math.prod(like.shape[1:])
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype)
        if like.ndim < 2 or inputs == 1:
            return torch.full(like.shape, float(not name.endswith(("bias", "mean"))), dtype=self.dtype)
        if inputs not in self._scaled:
            self._scaled[inputs] = (self._numbers * inputs**-0.5).to(self.dtype)
        return self._take(self._scaled[inputs], like.numel()).view(like.shape)

    def _take(self, numbers: Tensor, count: int) -> Tensor:
        taken, done = torch.empty(count, dtype=self.dtype), 0
        while done < count:
            piece = numbers[self._place : self._place + count - done]
            taken[done : done + len(piece)] = piece
            done, self._place = done + len(piece), (self._place + len(piece)) % PERIOD
        return taken


@dataclass(frozen=True)
class RandomPart:
    """A network on the meta device, and its folder; `describe` writes the files beside the weights."""

    folder: Path
    network: nn.Module
    stem: str  # beginning of the names of its weights' files
    describe: Callable[[Path], object]

    def tensors(self) -> dict[str, Tensor]:
        """Without the second names of shared ones."""
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.network.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), (name, tensor))
        return dict(first.values())

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def write(self, numbers: RandomNumbers) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.describe(self.folder)
        shards = list(self._shards(numbers.dtype.itemsize))
        places: dict[str, str] = {}
        for place, names in enumerate(shards, 1):
            number = f"-{place:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"{self.stem}{number}.safetensors"
            tensors = {name: numbers.weights(name, tensor) for name, tensor in names.items()}
            save_file(tensors, self.folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": numbers.dtype.itemsize * self.parameters}, "weight_map": places}
            (self.folder / f"{self.stem}.safetensors.index.json").write_text(json.dumps(index))

    def _shards(self, itemsize: int) -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        for name, tensor in self.tensors().items():
            if shard and itemsize * sum(one.numel() for one in (*shard.values(), tensor)) > SHARD:
                yield shard
                shard = {}
            shard[name] = tensor
        yield shard


def make_tokenizer(name: str, rows: int) -> Any:
    """A tokenizer of a class of transformers that reads bytes or letters, with as many entries as its model's embeddings need."""
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    kind = getattr(transformers, name)
    symbols = list(bytes_to_unicode().values())
    letters = ["▁", *map(chr, range(33, 127))]
    if name == "ByT5Tokenizer":
        return kind()
    if name == "CLIPTokenizer":  # the model reads its pooled state at the last entry, the end of text
        words = _filled([*symbols, *(f"{symbol}</w>" for symbol in symbols)], rows - 2)
        return kind(vocab=_numbered([*words, "<|startoftext|>", END]), merges=[], model_max_length=77)
    if name == "RobertaTokenizer":
        words = _filled(["<s>", "<pad>", "</s>", "<unk>", *symbols], int(KNOWN * rows))
        return kind(vocab=_numbered([*words, "<mask>"]), merges=[])
    if name == "Qwen2Tokenizer":
        words = _filled(symbols, int(KNOWN * rows) - 32)  # the rest is for special tokens
        ends = dict.fromkeys(("unk_token", "pad_token", "eos_token"), END)
        return kind(vocab=_numbered(words), merges=[], padding_side="right", **ends)
    if name == "GemmaTokenizer":
        words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        return kind(vocab=_numbered(_filled(words, int(KNOWN * rows))), merges=[], padding_side="left")
    words = _filled(["<pad>", "</s>", "<unk>", *letters], int(KNOWN * rows))
    scores = (-1.0 if place < 100 else -100.0 for place in range(len(words)))
    return kind(vocab=list(zip(words, scores)), extra_ids=0)


def _filled(words: list[str], count: int) -> list[str]:
    return [*words, *(f"<unused_{place}>" for place in range(len(words), count))]


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: place for place, word in enumerate(words)}
