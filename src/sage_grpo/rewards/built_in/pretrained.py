"""Shared code of rewards with networks: complete loading of models and tokenizers, moves between devices, batches of frames."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sage_grpo.rewards.frames import sample_indices
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import RewardFacts
from sage_grpo.utils.pretrained import from_pretrained, loading_fault, tokenizer_files_fault, vocabulary_fault

Layers = Sequence[tuple[Tensor, Tensor]]
"""Weights and biases of linear layers, in order."""


class NetworkReward(ABC):
    """A reward whose network moves between devices, of one part that its facts name unless it says otherwise; subclasses score the clips."""

    facts: ClassVar[RewardFacts]

    def __init__(
        self, model: Any, *, dtype: str | None = "", layers: Layers = (), sample_fps: float, num_frames: int = 0
    ) -> None:
        """dtype: the model's dtype for computing; empty is float32, None keeps its own. layers: those of a head, always float32.

        sample_fps, num_frames: frames per second that are read, and their largest number (0: no limit).
        """
        self.model = frozen(model)
        self._dtype = None if dtype is None else getattr(torch, dtype or "float32")
        self._layers = layers
        self._sample_fps, self._num_frames = sample_fps, num_frames

    @abstractmethod
    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score clips B x F x H x W x 3: uint8, or floats in [0, 255] with a graph. Equal values have equal scores."""

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        return self.differentiable(videos, prompts, fps)

    def frames_read(self, count: int, fps: float) -> list[int]:
        return sample_indices(count, fps, sample_fps=self._sample_fps, max_frames=self._num_frames)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.facts.parts,)

    def to(self, device: torch.device) -> Self:
        self.model.to(device=device, dtype=self._dtype)
        self._layers = [(weight.to(device), bias.to(device)) for weight, bias in self._layers]
        return self


def frozen(model: Any) -> Any:
    """A network for scoring: no dropout, no gradient of weights, activation checkpointing of its repeated blocks for a backward pass to the pixels."""
    for block in _blocks(model):
        vars(block)["forward"] = partial(_again, block.forward)
    return model.eval().requires_grad_(False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _blocks(child)


def _again(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


def load_whole(
    kind: Any,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    state: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """A transformers model; missing or unexpected weights are an error, never random values.

    state: weights in place of the file's, for the model that `config` describes. options: arguments of the model's class.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report of missing weights: it becomes an error below
    try:
        model, info = from_pretrained(
            kind,
            name if state is None else None,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if state is None else {"state_dict": dict(state)}),
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)
    fault = loading_fault(info)
    if fault is not None:
        raise RewardConfigError(f'The weights in "{name}" do not fit a {kind.__name__}: it {fault}. Download it again.')
    return model


def load_tokenizer(name: str, rows: int) -> Any:
    """The tokenizer of a text model with `rows` embeddings; one without its files is refused, since it would read every prompt alike."""
    from transformers import AutoTokenizer

    try:
        tokenizer = from_pretrained(AutoTokenizer, name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardConfigError(
            f'The tokenizer in "{name}" cannot be loaded ({error}). Are all of its files there (tokenizer.json, or vocab.json '
            "and merges.txt)?"
        ) from error
    fault = tokenizer_files_fault(tokenizer.vocab_files_names, name) or vocabulary_fault(tokenizer, name, rows)
    if fault is not None:
        raise RewardConfigError(f"{fault[0].upper()}{fault[1:]}. Download the folder again in full.")
    return tokenizer


def read_weights(file: Path, source: str = "") -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a pickle, which cannot run code when only weights are read. source: advice for errors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise RewardConfigError(f"{file} does not exist.{source}")
    try:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except SafetensorError as error:
        raise RewardConfigError(f"{file} is damaged ({error}): download it again.{source}") from error


def linear_layers(state: Mapping[str, Tensor], file: str) -> Layers:
    """The weight and bias of each linear layer, in the order of the layers' numbers (those between are activations and dropouts)."""
    names = sorted({name.rpartition(".")[0] for name in state}, key=lambda name: [*map(int, re.findall(r"\d+", name))])
    pairs = [[f"{name}.{kind}".removeprefix(".") for kind in ("weight", "bias")] for name in names]
    if not pairs or set(chain(*pairs)) != state.keys():
        raise RewardConfigError(f"{file} has no whole head (weight and bias of each layer): {sorted(state)[:6]}.")
    return [(state[weight].float(), state[bias].float()) for weight, bias in pairs]
