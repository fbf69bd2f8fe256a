"""Approximate passes for steps that are not trained: diffusers' caches of block outputs, or another attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from diffusers.hooks import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS as LISTS
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements
from diffusers.models.cache_utils import CacheMixin
from torch import nn

from sage_grpo.models import ModelError
from sage_grpo.models.cheap import CheapSpec
from sage_grpo.models.network.attention import processors, set_backend
from sage_grpo.models.network.blocks import without_graphs

WARM_UP = 2
"""Steps that taylorseer runs whole before it extrapolates: a slope needs two."""


def check_given(spec: CheapSpec, networks: Sequence[Any], blocks: Sequence[nn.Module]) -> None:
    """Refuse a cache whose hooks do not reach these networks or know their blocks, and a kernel that is not available."""
    if spec.attention is not None:
        _backend(spec.attention, networks)
    if spec.cache is None:
        return
    for network in networks:
        names = {name.partition(".")[0] for name, module in network.named_modules() if any(module is b for b in blocks)}
        reached = isinstance(network, CacheMixin) and names <= set(LISTS)
        if not reached or (spec.cache == "taylorseer" and not hasattr(network, "proj_out")):
            raise ModelError(
                f'rollout.cheap.cache "{spec.cache}": diffusers has no caches for {type(network).__name__}. Leave it out.'
            )
    if spec.cache == "first_block" and len(blocks) < 2:
        raise ModelError(
            f'rollout.cheap.cache "first_block" leaves out what follows the first block, and there is {len(blocks)}: leave it out.'
        )
    for kind in {type(block) for block in blocks} if spec.cache == "first_block" else ():
        if _metadata(kind) is None:
            raise ModelError(
                f'rollout.cheap.cache "first_block": diffusers does not know what {kind.__name__} returns. Use taylorseer, or none.'
            )


@contextmanager
def given_passes(spec: CheapSpec, networks: Sequence[Any], blocks: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """A context in which the networks run as the spec sets. The function that it yields clears the caches, for another clip."""
    with ExitStack() as stack:
        if spec.attention is not None:
            backend = _backend(spec.attention, networks)
            for network in networks:
                before = {id(one): one._attention_backend for one in processors(network)}
                stack.callback(_restore, network, before)
                set_backend(network, backend)
        if spec.cache is not None:
            for kind in {type(block) for block in blocks}:
                _metadata(kind)
            stack.enter_context(without_graphs())
            for network in networks:
                network.enable_cache(_config(spec))
                stack.callback(network.disable_cache)

        def forget() -> None:
            for network in networks if spec.cache is not None else ():
                network._reset_stateful_cache()

        yield forget


def _restore(network: nn.Module, before: dict[int, Any]) -> None:
    for processor in processors(network):
        processor._attention_backend = before[id(processor)]


def _config(spec: CheapSpec) -> Any:
    if spec.cache == "first_block":
        return FirstBlockCacheConfig(threshold=spec.cache_threshold)
    # Lite: blocks are left out whole and only the network's output is kept, which is small enough for float32.
    return TaylorSeerCacheConfig(
        cache_interval=spec.cache_every,
        disable_cache_before_step=WARM_UP,
        max_order=1,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    )


def _metadata(kind: type) -> Any:
    """diffusers' metadata of a class of blocks, also registered for the subclass that sharding makes; None where it has none."""
    _complete()
    for base in kind.__mro__:
        try:
            known = TransformerBlockRegistry.get(base)
        except ValueError:
            continue
        if base is not kind:
            copied = TransformerBlockMetadata(
                known.return_hidden_states_index, known.return_encoder_hidden_states_index
            )
            TransformerBlockRegistry.register(kind, copied)
        return known
    return None


@cache
def _complete() -> None:
    """diffusers' table of blocks lacks HunyuanVideo-1.5's, which return the video's stream and the text's, as HunyuanVideo's do."""
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

    streams = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, streams)


def _backend(name: str, networks: Sequence[Any]) -> AttentionBackendName:
    known = [backend.value for backend in AttentionBackendName if not backend.value.endswith("_hub")]
    if name not in known:
        why = " Backends that fetch code from the hub are not supported." if name.endswith("_hub") else ""
        raise ModelError(
            f'rollout.cheap.attention "{name}" is not a backend.{why} Use one of {", ".join(known)}, or leave it out.'
        )
    if not all(processors(network) for network in networks):
        raise ModelError(
            f'rollout.cheap.attention "{name}": this network knows PyTorch\'s own choice only. Leave it out.'
        )
    backend = AttentionBackendName(name)
    try:
        _check_attention_backend_requirements(backend)
    except RuntimeError as error:
        raise ModelError(f'rollout.cheap.attention "{name}" does not run here: {error}') from error
    return backend
