"""Attention backends, chosen per model, and the attention of HunyuanVideo-1.5 without a mask."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from sage_grpo.models.sequence import SequenceSplit, SplitRotary
from sage_grpo.models.spec import ModelError


class PackedAttention:
    """Joint attention of video and text tokens in which every token is valid.

    The stock processor pads the text mask to a dense N x N mask even where nothing is masked: at 480p x 81 frames that is
    33,000 x 33,000, and it rules out the fast kernels. With padding dropped there is nothing to mask. A call with a mask
    goes to the stock processor, so the stock forward still works on the same modules.
    """

    # Names that diffusers sets from outside (context parallelism, backends).
    _attention_backend: AttentionBackendName | None = None
    _parallel_config: Any = None
    sequence: SequenceSplit | None = None
    """Set where other ranks have the other tokens; `image_rotary_emb` is then a SplitRotary."""

    def __init__(self) -> None:
        self._stock = HunyuanVideo15AttnProcessor2_0()
        self._stock._attention_backend = AttentionBackendName.NATIVE  # of the fast kernels none takes a mask

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | SplitRotary | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns the video and the text stream."""
        if attention_mask is not None:
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

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Under autocast the norms give float32 while the values stay in the network's dtype.
            return dispatch_attention_fn(
                query.to(value.dtype),
                key.to(value.dtype),
                value,
                backend=self._attention_backend,
                parallel_config=self._parallel_config,
            )

        if self.sequence is None:
            attended = attend(query, key, value).flatten(2, 3)
        else:
            attended = self.sequence.attend(attend, query, key, value, image_rotary_emb.counts).flatten(2, 3)
        video, text = attended.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)


class SplitSelfAttention:
    """Wan's self-attention where other ranks have the other tokens."""

    def __init__(self, sequence: SequenceSplit, backend: AttentionBackendName | None) -> None:
        self.sequence, self._attention_backend = sequence, backend

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: SplitRotary | None = None,
    ) -> Tensor:
        """Attend."""
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return dispatch_attention_fn(query, key, value, backend=self._attention_backend)

        query, key = rotate_pairs(query, rotary_emb), rotate_pairs(key, rotary_emb)
        attended = self.sequence.attend(attend, query, key, value, rotary_emb.counts)
        return attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).type_as(query)))


def rotate_pairs(tokens: Tensor, rotary: SplitRotary) -> Tensor:
    """Wan's rotary embedding: neighbouring channels are the two coordinates of one rotation."""
    first, second = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary.cos[..., 0::2], rotary.sin[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(tokens)


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackendName:
    """The backend of a spec; "auto" is cuDNN where it runs (CUDA, bfloat16), PyTorch's own choice elsewhere."""
    if name == "auto":
        fast = device.type == "cuda" and dtype == torch.bfloat16
        return AttentionBackendName._NATIVE_CUDNN if fast else AttentionBackendName.NATIVE
    known = [backend.value for backend in AttentionBackendName if not backend.value.endswith("_hub")]
    if name not in known:
        why = " Backends that fetch code from the hub are not supported." if name.endswith("_hub") else ""
        raise ModelError(f'model.attention "{name}" is not a backend.{why} Use "auto" or one of {", ".join(known)}.')
    return AttentionBackendName(name)


def set_backend(network: nn.Module, backend: AttentionBackendName) -> None:
    """Set the backend of one network; diffusers' set_attention_backend would also change the process's default."""
    for module in network.modules():
        processor = getattr(module, "processor", None)
        if isinstance(processor, PackedAttention | WanAttnProcessor):
            processor._attention_backend = backend
