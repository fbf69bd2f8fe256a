"""Loading the models and tokenizers of rewards whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.pretrained import loading_fault, tokenizer_files_fault, vocabulary_fault, weights_fault
from sage_grpo.rewards.functions import RewardConfigError


def load_whole(
    kind: Any,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    state: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """A transformers model; weights that its file lacks or has too many of are an error, never random.

    state: weights that stand in for the file's; `config` then says what they belong to. options: arguments of the model's class.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report of missing weights: it becomes an error below
    try:
        model, info = kind.from_pretrained(
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
        raise RewardConfigError(
            f'The weights in "{name}" do not fit a {kind.__name__}: it {fault}. Download it again in full.'
        )
    return model


def load_tokenizer(name: str, rows: int) -> Any:
    """The tokenizer of a text model with `rows` embeddings; one without its files would read every prompt alike."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardConfigError(
            f'The tokenizer in "{name}" cannot be loaded ({error}). Are all of its files there (tokenizer.json, or vocab.json '
            "and merges.txt)?"
        ) from error
    fault = tokenizer_files_fault(tokenizer.vocab_files_names, name) or vocabulary_fault(tokenizer, name, rows)
    if fault is not None:
        raise RewardConfigError(f"{fault[0].upper()}{fault[1:]}. Download the folder again in full.")
    return tokenizer


def read_safetensors(path: str, convert: str) -> dict[str, Tensor]:
    """The weights of a file in its authors' names; `convert` says how their own file becomes this one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path).expanduser()
    if file.suffix != ".safetensors":
        raise RewardConfigError(f"{file} is not read: only safetensors cannot run code. {convert}")
    if not file.is_file():
        raise RewardConfigError(f"{file} does not exist. {convert}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise RewardConfigError(f"{file} is damaged ({error}): make it again. {convert}") from error


def fill(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Put weights into a model, all of them and in their shapes; RewardConfigError names the others."""
    own = model.state_dict()
    fault = weights_fault(
        own.keys() - state.keys(),
        state.keys() - own.keys(),
        [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape],
    )
    if fault is not None:
        raise RewardConfigError(f"{what} does not fit: it {fault}.")
    model.load_state_dict(dict(state))
