"""Sequence parallelism for networks of diffusers: tokens are split before the blocks and merged behind them, and attention goes through the ranks.

diffusers' own plans (`_cp_plan`) have the places; its attention has no gradients that cross ranks, and splits evenly only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from sage_grpo.models.base import SequenceSplit

TOKENS, TEXT, SOUND = "hidden_states", "encoder_hidden_states", "audio_hidden_states"
"""The networks' names for their tokens."""


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The places where the tokens of a network are split and merged."""

    inputs: Mapping[str, int]
    """Inputs that have a value for each token, with the dimension of the tokens; one that has no such dimension is left as it is."""
    at: str = ""
    """The module whose inputs they are; "" is the network."""
    positions: tuple[str, ...] = ()
    """Modules that make rotary embeddings of all tokens, whatever the network was given; tokens are their last dimension but one."""
    rotary: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"image_rotary_emb": (TOKENS,)})
    """Inputs of the blocks, each with the streams of tokens that it belongs to and that attend together."""
    merged: Mapping[str, str] = field(default_factory=lambda: {"proj_out": TOKENS})
    """Modules behind the blocks, each with the stream whose tokens come out of it."""


JOINT = {"image_rotary_emb": (TOKENS, TEXT)}
"""Rotary embeddings of two streams that attend together."""


class CountedRotary(tuple[Tensor, Tensor]):
    """A rotary embedding of this rank's tokens, with the number that every rank has (as in SplitRotary); networks unpack it as their own."""

    counts: list[int]


@dataclass(frozen=True)
class Across:
    """Replaces diffusers' `parallel_config`: attention over the tokens of all ranks."""

    sequence: SequenceSplit
    counts: list[int]
    """Query tokens of every rank, and its key tokens where `key_counts` is None."""
    key_counts: list[int] | None


def split_network(network: Any, blocks: Sequence[nn.Module], sequence: SequenceSplit, plan: SplitPlan) -> None:
    """From now on the network runs this rank's part of its tokens, and returns all of them."""
    totals: dict[str, int] = {}
    streams = {stream for streams in plan.rotary.values() for stream in streams}

    def note(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        totals.update({stream: named[stream].shape[1] for stream in streams})

    def split(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {name: named[name] for name, dim in plan.inputs.items() if named[name].ndim > max(dim, 0)}
        return arguments, named | {name: sequence.split(one, plan.inputs[name]) for name, one in given.items()}

    def place(module: nn.Module, arguments: Any, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return sequence.split(rotary[0], -2), sequence.split(rotary[1], -2)

    def count(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        counted = {}
        for name, streams in plan.rotary.items():
            counted[name] = CountedRotary(named[name])
            counted[name].counts = [sum(parts) for parts in zip(*(sequence.counts(totals[one]) for one in streams))]
        return arguments, named | counted

    def merge(stream: str, module: nn.Module, arguments: Any, tokens: Tensor) -> Tensor:
        return sequence.merge(tokens, totals[stream])

    network.register_forward_pre_hook(note, with_kwargs=True)
    network.get_submodule(plan.at).register_forward_pre_hook(split, with_kwargs=True)
    for name in plan.positions:
        network.get_submodule(name).register_forward_hook(place)
    for name, stream in plan.merged.items():
        network.get_submodule(name).register_forward_hook(partial(merge, stream))
    for block in blocks:
        block.register_forward_pre_hook(count, with_kwargs=True)
        attention: list[Any] = [module for module in block.modules() if getattr(module, "processor", None) is not None]
        for module in attention:
            sequence.check(module.heads)
            module.register_forward_pre_hook(partial(_reach, sequence), with_kwargs=True)
            sys.modules[type(module.processor).__module__].dispatch_attention_fn = _dispatch  # type: ignore[attr-defined]


def _reach(sequence: SequenceSplit, module: Any, arguments: Any, named: dict[str, Any]) -> None:
    """Set before each attention the token counts of the ranks. Text that is whole on every rank has no positions and needs none."""
    asking, asked = named.get("query_rotary_emb", named.get("image_rotary_emb")), named.get("key_rotary_emb")
    across = None
    if isinstance(asking, CountedRotary):
        across = Across(sequence, asking.counts, asked.counts if isinstance(asked, CountedRotary) else None)
    module.processor._parallel_config = across


def _dispatch(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """diffusers' dispatcher, which every network of its module calls from now on; only calls with `Across` reach other ranks."""
    across = named.get("parallel_config")
    if not isinstance(across, Across):
        return dispatch_attention_fn(query, key, value, *arguments, **named)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dispatch_attention_fn(query, key, value, *arguments, **{**named, "parallel_config": None})

    return across.sequence.attend(kernel, query, key, value, across.counts, across.key_counts)
