"""Counts operations and bytes of a network and its decoder by running them without storage, on the meta device. A
family therefore needs no cost description."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import empty

FLASH = torch.ops.aten._scaled_dot_product_flash_attention
SPACED = 32  # Z-Image pads a text to a multiple of this many tokens
FRAMES = 33  # frames of a clip whose decoding is counted: more than the chunks of any VAE


class Blocks(NamedTuple):
    """Operations and bytes of the mean block of a network for one clip; the first three as in NetworkShape."""

    video_products: float
    text_products: float
    pairs: tuple[float, float, float]
    saved: float  # bytes that are kept for a backward pass to all weights, in bfloat16, per token and unit of width


class Decoder(NamedTuple):
    """Operations and peak bytes in bfloat16 of decoding a clip, per pixel, and the pixels that are decoded at once."""

    operations: float
    working: float
    at_once: int


class OperationCounter(TorchDispatchMode):
    """Sums operations, and records the peak of live bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = self.products = 0.0
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            number = float(formula(*args, **kwargs, out_val=out))
            if func._overloadpacket is FLASH:
                self.attention += number
            else:
                self.products += number
        storages = [one.untyped_storage() for one in tree_leaves(out) if isinstance(one, Tensor)]
        self._live |= {one._cdata: (StorageWeakRef(one), one.nbytes()) for one in storages}
        self._live = {place: one for place, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


class FlashAttention(TorchFunctionMode):
    """Runs attention as a GPU does, without a matrix of all pairs or a mask, which changes neither operations nor kept bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return FLASH(*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[0]


@contextmanager
def _counted(times: Mapping[nn.Module, int]) -> Iterator[SimpleNamespace]:
    """Operations and bytes kept for a backward pass of the blocks that run inside, each counted so many times."""
    total = SimpleNamespace(attention=0.0, products=0.0, saved=0.0)

    def run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = {id(parameter.untyped_storage()) for parameter in block.parameters()}
        kept: dict[int, Any] = {}

        def keep(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if id(storage) not in own:
                kept[id(storage)] = storage
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), OperationCounter() as counter:
            out = forward(*args, **kwargs)
        total.attention += times[block] * counter.attention
        total.products += times[block] * counter.products
        total.saved += times[block] * sum(one.nbytes() for one in kept.values())
        return out

    with ExitStack() as stack:
        for block in times:
            block.forward = partial(run, block, block.forward)
            stack.callback(delattr, block, "forward")
        yield total


_known: dict[Hashable, Any] = {}
"""Counts by network and size: a plan asks for the same many times, and networks without storage are kept."""


def count_blocks(model: FamilyModel) -> Blocks:
    """Count a network's blocks at the model's own size, with texts of three lengths."""
    key = (model.transformer, model.video, model.text_tokens, model.given_tokens)
    if key in _known:
        return _known[key]
    width = math.prod(model.heads)
    trial, times = _shortened(model)
    blocks, tokens = sum(times.values()), model.tokens + model.given_tokens
    unit = max(1, model.text_tokens // (3 * SPACED)) * SPACED
    passes = []
    for words in (unit, 2 * unit, 3 * unit):
        inputs = {name: one[None] for name, one in trial._trial_inputs(words).items()}
        with _counted(times) as one, torch.enable_grad(), FlashAttention():
            trial._forward(empty(1, *trial.latent_shape(), dtype=torch.bfloat16), torch.tensor(1.0), empty(1), inputs)
        passes.append(one)
    first, second, third = (one.attention / (4 * width * blocks) for one in passes)
    of_text = (first - 2 * second + third) / (2 * unit**2)
    by_text = (second - first) / unit - 3 * of_text * unit
    products, more, _ = (one.products / (2 * width**2 * blocks) for one in passes)
    _known[key] = Blocks(
        video_products=(2 * products - more) / tokens,
        text_products=(more - products) / unit,
        pairs=((first - by_text * unit - of_text * unit**2) / tokens**2, by_text / tokens, of_text),
        saved=passes[2].saved / (blocks * width * (tokens + 3 * unit * (of_text > 0))),
    )
    return _known[key]


def _shortened(model: FamilyModel) -> tuple[FamilyModel, dict[nn.Module, int]]:
    """The model in bfloat16 with one block of each kind, and the number of blocks of each kind."""
    trial, transformer = copy.copy(model), copy.copy(model.transformer)
    transformer._modules = dict(transformer._modules)
    kinds: Counter[Hashable] = Counter(map(_kind, model.blocks()))
    for name in model.traits.blocks:
        found = {_kind(block): block for block in getattr(model.transformer, name)}
        transformer._modules[name] = nn.ModuleList(found.values())
    transformer = copy.deepcopy(transformer)
    nn.Module.bfloat16(transformer)
    trial.spec = replace(model.spec, train=False, lora=None)
    trial.dtype = torch.bfloat16
    trial.transformer, trial.network, trial.others = transformer, model._adapted(transformer), []
    return trial, {block: kinds[_kind(block)] for block in trial.blocks()}


def _kind(block: nn.Module) -> Hashable:
    return type(block), tuple((name, parameter.shape) for name, parameter in block.named_parameters())


def count_decoder(model: FamilyModel) -> Decoder:
    """Count a decoder on the beginning of a clip, whose frames are decoded together."""
    key = (model.pipe.vae, model.video)
    if key in _known:
        return _known[key]
    vae, trial = model.pipe.vae, copy.copy(model)
    trial.video = replace(model.video, frames=min(model.video.frames, FRAMES))
    trial.pipe = copy.copy(model.pipe)
    trial.pipe.vae = copy.deepcopy(vae).bfloat16()
    codec = trial.codec
    with torch.no_grad(), FlashAttention(), OperationCounter() as counter:
        for chunk in codec.chunks(codec.to_vae(empty(1, *trial.latent_shape(), dtype=torch.bfloat16))):
            del chunk
    area = model.video.height * model.video.width
    pixels = trial.video.frames * area
    frames = trial.video.frames if getattr(vae, "use_framewise_decoding", False) else model.video.frames
    _known[key] = Decoder((counter.attention + counter.products) / pixels, counter.peak / pixels, frames * area)
    return _known[key]
