"""Attention backends, chosen per model, and the attention of HunyuanVideo-1.5 and Wan without masks and copies."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.models import ModelError


class SplitRotary(NamedTuple):
    """Rotary embedding of this rank's tokens, with the number of tokens (video and text) of every rank. Attention must not remember the counts: a
    checkpointed block runs again in the backward pass, after texts of other lengths."""

    cos: Tensor
    sin: Tensor
    counts: list[int]


def split_rotary(sequence: SequenceParallel, rotary: tuple[Tensor, Tensor], *, dim: int, extra: int = 0) -> SplitRotary:
    cos, sin = rotary
    counts = [video + text for video, text in zip(sequence.counts(cos.shape[dim]), sequence.counts(extra))]
    return SplitRotary(sequence.split(cos, dim), sequence.split(sin, dim), counts)


class PackedAttention:
    """Joint attention of video and text tokens in which every token is valid; returns the video and the text stream. The stock processor makes a
    dense N x N mask even where nothing is masked (33,000 x 33,000 at 480p x 81 frames), which rules out the fast kernels. A call with the stock mask
    (batch x text tokens) goes to the stock processor, so that the stock forward works on the same modules; a mask over all keys (batch x 1 x 1 x
    tokens) is ours."""

    _attention_backend: AttentionBackendName | None = None  # diffusers' name
    sequence: SequenceParallel | None = None
    """Set where other ranks have the other tokens; `image_rotary_emb` is then a SplitRotary."""

    def __init__(self) -> None:
        self._stock = HunyuanVideo15AttnProcessor2_0()
        self._stock._attention_backend = AttentionBackendName.NATIVE  # no fast kernel takes a mask

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        image_rotary_emb: tuple[Tensor, Tensor] | SplitRotary,
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None and attention_mask.ndim == 2:
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        def heads(tokens: Tensor) -> Tensor:
            return tokens.unflatten(2, (attn.heads, -1))

        query = attn.norm_q(heads(attn.to_q(hidden_states)))
        key = attn.norm_k(heads(attn.to_k(hidden_states)))
        query = apply_rotary_emb(query, image_rotary_emb[:2], sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb[:2], sequence_dim=1)
        query = torch.cat([query, attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states)))], dim=1)
        key = torch.cat([key, attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states)))], dim=1)
        value = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(encoder_hidden_states))], dim=1)

        kernel = partial(attend, backend=self._attention_backend, mask=attention_mask)
        if self.sequence is None:
            attended = kernel(query, key, value).flatten(2, 3)
        else:
            counts = cast(SplitRotary, image_rotary_emb).counts
            attended = self.sequence.attend(kernel, query, key, value, counts).flatten(2, 3)
        video, text = attended.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


class PlainAttention:
    """Wan's attention without copies around the kernel; calls with a mask or an image beside the text go to the stock processor."""

    _attention_backend: AttentionBackendName | None = None
    sequence: SequenceParallel | None = None
    """Set where other ranks have the other tokens; `rotary_emb` is then a SplitRotary."""

    def __init__(self) -> None:
        self._stock = WanAttnProcessor()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | SplitRotary | None = None,
    ) -> Tensor:
        if attn.add_k_proj is not None or attention_mask is not None:
            self._stock._attention_backend = self._attention_backend
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = rotate_pairs(query, rotary_emb), rotate_pairs(key, rotary_emb)
        kernel = partial(attend, backend=self._attention_backend)
        if self.sequence is None or encoder_hidden_states is not None:  # text is whole on every rank
            attended = kernel(query, key, value)
        else:
            attended = self.sequence.attend(kernel, query, key, value, cast(SplitRotary, rotary_emb).counts)
        return attn.to_out[1](attn.to_out[0](attended.flatten(2, 3)))


KERNELS = {
    AttentionBackendName._NATIVE_CUDNN: SDPBackend.CUDNN_ATTENTION,
    AttentionBackendName._NATIVE_FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionBackendName._NATIVE_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
"""PyTorch's own kernels, called without the copies that diffusers makes around them."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, backend: AttentionBackendName | None, mask: Tensor | None = None
) -> Tensor:
    query, key = query.to(value.dtype), key.to(value.dtype)
    if mask is not None:  # no fast kernel takes a mask
        backend = AttentionBackendName.NATIVE
    if backend not in KERNELS:
        return dispatch_attention_fn(query, key, value, attn_mask=mask, backend=backend)
    with sdpa_kernel(KERNELS[backend]):
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return attended.transpose(1, 2)


def rotate_pairs(tokens: Tensor, rotary: tuple[Tensor, Tensor] | SplitRotary) -> Tensor:
    """Wan's rotary embedding: neighboring channels are the two coordinates of one rotation."""
    first, second = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(tokens)


class Shape(NamedTuple):
    """The sizes of attention's inputs."""

    tokens: int
    heads: int
    channels: int


CLEARLY = 0.85
"""Another kernel than cuDNN's is taken when it needs at most this share of its time: between kernels that are about equally fast
a measurement would choose now the one and now the other, and a run could not be continued to the bit."""
REPEATABLE = (
    AttentionBackendName.NATIVE,
    AttentionBackendName._NATIVE_FLASH,
    AttentionBackendName._NATIVE_EFFICIENT,
    AttentionBackendName._NATIVE_MATH,
)
"""Backends with a backward pass that can add up in a fixed order; the first where PyTorch does not choose cuDNN's kernel."""


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, shape: Shape, *, deterministic: bool = False
) -> tuple[AttentionBackendName, str]:
    """The backend of a spec, with the reason. "auto" measures on CUDA in bfloat16, and is PyTorch's own choice elsewhere."""
    if name == "auto":
        if device.type != "cuda" or dtype != torch.bfloat16:
            return AttentionBackendName.NATIVE, "PyTorch's own choice"
        return _fastest(device, dtype, shape, deterministic=deterministic)
    known = [backend.value for backend in AttentionBackendName if not backend.value.endswith("_hub")]
    if name not in known:
        why = " Backends that fetch code from the hub are not supported." if name.endswith("_hub") else ""
        raise ModelError(f'model.attention "{name}" is not a backend.{why} Use "auto" or one of {", ".join(known)}.')
    if deterministic and name not in REPEATABLE:
        raise ModelError(
            f'model.attention "{name}" has no backward pass that adds up in a fixed order, which model.deterministic asks for. Use "auto" or one of '
            f"{', '.join(REPEATABLE)}; or set model.deterministic to false."
        )
    return AttentionBackendName(name), f"{name}, as asked"


@cache
def _fastest(
    device: torch.device, dtype: torch.dtype, shape: Shape, *, deterministic: bool
) -> tuple[AttentionBackendName, str]:
    """cuDNN's kernel, or PyTorch's flash attention where that is clearly faster, the other does not run, or it shall be deterministic."""
    both = [AttentionBackendName._NATIVE_CUDNN, AttentionBackendName._NATIVE_FLASH]
    if deterministic:
        both.remove(AttentionBackendName._NATIVE_CUDNN)
    times = {backend: ms for backend in both if (ms := _milliseconds(backend, device, dtype, shape)) is not None}
    if not times:
        return AttentionBackendName.NATIVE, "PyTorch's own choice: the fast kernels do not run here"
    best, *others = times
    best = next((other for other in others if times[other] < CLEARLY * times[best]), best)
    names = {backend: backend.value.removeprefix("_native_") for backend in both}
    timings = ", ".join(f"{names[backend]} {ms:.1f} ms" for backend, ms in times.items())
    return best, f"{names[best]} (measured, {shape.tokens} tokens forward and backward: {timings})"


def _milliseconds(
    backend: AttentionBackendName, device: torch.device, dtype: torch.dtype, shape: Shape
) -> float | None:
    query, key, value = (torch.randn((1, *shape), device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        with torch.enable_grad():
            for _ in range(2):
                start.record()
                attended = attend(query, key, value, backend=backend)
                torch.autograd.grad(attended, (query, key, value), torch.ones_like(attended))
                end.record()
    except RuntimeError:  # not for this GPU, or not for these heads
        return None
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def checked_backend(asked: str, network: nn.Module) -> str:
    if any(asked != "auto" or isinstance(one, PackedAttention | PlainAttention) for one in processors(network)):
        return asked
    if asked not in ("auto", "native"):
        raise ModelError(f'model.attention "{asked}": this network knows PyTorch\'s own choice only. Use "auto".')
    return "native"


def set_backend(network: nn.Module, backend: AttentionBackendName) -> None:
    for processor in processors(network):
        processor._attention_backend = backend


def processors(network: nn.Module) -> list[Any]:
    """The processors whose backend can be chosen; older ones of diffusers (SD3.5's) call PyTorch themselves."""
    candidates = [getattr(module, "processor", None) for module in network.modules()]
    return [processor for processor in candidates if "_attention_backend" in dir(type(processor))]
