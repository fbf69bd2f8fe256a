"""The networks and the tokenizer of the scenes world's model, all diffusers' and transformers' own classes; and fast ways to run its transformer.

The fast ways use the very same modules and give the same numbers. Wan pads every text to 512 tokens with zeros and attends to all of them;
zeros are all alike, so one of them with the weight of all is enough. The VAE's fast way is in whole_clips.py.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from research.pretraining.scenes.options import Sizes
from sage_grpo.models.families.wan import TEXT_TOKENS
from sage_grpo.models.network.attention import PlainAttention

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
DOWN = 4
"""Compression of latents in space and in time."""


def build_vae(sizes: Sizes) -> AutoencoderKLWan:
    """A VAE that makes clips 4 times smaller in space and in time; its latents have unit scale once they are measured.

    Its residual blocks add nothing yet: what starts to learn is the short way through it.
    """
    from diffusers import AutoencoderKLWan

    first, *others = sizes.vae_channels
    if len(others) != 2 or any(channels % first for channels in others):
        raise ValueError(
            f"vae_channels are three, from full to lowest resolution, each a multiple of the first, got {sizes.vae_channels}."
        )
    vae = AutoencoderKLWan(
        base_dim=first,
        z_dim=sizes.latent_channels,
        dim_mult=[channels // first for channels in sizes.vae_channels],
        num_res_blocks=sizes.vae_layers,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * sizes.latent_channels,
        latents_std=[1.0] * sizes.latent_channels,
        scale_factor_temporal=DOWN,
        scale_factor_spatial=DOWN,
    )
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.bias is not None:
            nn.init.zeros_(module.bias)
            if name.endswith((".conv2", ".proj")):
                nn.init.zeros_(module.weight)
            else:
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    return vae


def build_transformer(sizes: Sizes) -> WanTransformer3DModel:
    """The velocity network, with a calm start: a velocity of zero, and blocks that add nothing yet (DiT's adaLN-zero)."""
    from diffusers import WanTransformer3DModel

    width = sizes.heads * sizes.head_dim
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_dim,
        in_channels=sizes.latent_channels,
        out_channels=sizes.latent_channels,
        text_dim=sizes.text_width,
        freq_dim=128,
        ffn_dim=4 * width,
        num_layers=sizes.blocks,
        rope_max_seq_len=64,
    )
    for linear in (module for module in transformer.modules() if isinstance(module, nn.Linear)):
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
    silent = [transformer.proj_out, transformer.condition_embedder.time_proj]
    silent += [block.attn2.to_out[0] for block in transformer.blocks]
    for linear in silent:
        nn.init.zeros_(linear.weight)
    for block in transformer.blocks:
        nn.init.zeros_(block.scale_shift_table)
    return transformer


def build_text_encoder(sizes: Sizes, vocabulary: int) -> UMT5EncoderModel:
    """A tiny UMT5 encoder, which is trained with the flow."""
    from transformers import UMT5Config, UMT5EncoderModel

    heads = 4
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=sizes.text_width,
        d_kv=sizes.text_width // heads,
        d_ff=2 * sizes.text_width,
        num_layers=sizes.text_layers,
        num_heads=heads,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return UMT5EncoderModel(config)


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as T5's, in which every word of the world is one token; other words are spelled. Capitals and punctuation do not matter.

    The class T5Tokenizer would forget the rule on capitals when it is loaded: it keeps nothing of its file but the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # A word costs nothing and a letter much, so that a known word is never spelled.
    pieces = [(f"▁{word}", 0.0) for word in sorted(words)] + [(letter, -20.0) for letter in string.ascii_lowercase]
    tokenizer = Tokenizer(models.Unigram([(PAD, 0.0), (END, 0.0), (UNKNOWN, 0.0), ("▁", -20.0), *pieces], unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[.,;:!?\"()]"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="right"
    )


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], length: int) -> Tensor:
    """Token ids n x length, padded with zeros: at least one, which stands for all of the padding."""
    rows = tokenizer(list(prompts))["input_ids"]
    longest = max(map(len, rows))
    if longest >= length:
        raise ValueError(f"A caption has {longest} tokens, so that ids need a length of more, got {length}.")
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def encode_text(text_encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """The text states that the pipeline gives the transformer, B x L x D, of ids padded to any length: zeros where there is padding."""
    encoder, valid = text_encoder.encoder, ids != 0
    hidden = encoder.embed_tokens(ids)
    unseen = torch.zeros_like(ids, dtype=hidden.dtype).masked_fill(~valid, torch.finfo(hidden.dtype).min)
    for block in encoder.block:
        layer, feed_forward = block.layer
        attention = layer.SelfAttention
        normed = layer.layer_norm(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)
            for project in (attention.q, attention.k, attention.v)
        )
        position = attention.compute_bias(ids.shape[1], ids.shape[1], device=ids.device)
        scores = (query @ key.transpose(-1, -2)).float() + position.float() + unseen[:, None, None]
        attended = (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        hidden = feed_forward(hidden + attention.o(attended))
    return cast(Tensor, encoder.final_layer_norm(hidden)) * valid[..., None]


class FewTokens:
    """Wan's cross-attention to a text whose padding is one token, which counts as often as there would be padding."""

    weight: Tensor
    """log of how often every token counts, B x L."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, *unused: Any) -> Tensor:
        """Attend; no text has a position."""
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        scores = (query @ key.transpose(-1, -2)).float() / math.sqrt(query.shape[-1]) + self.weight[:, None, None]
        attended = scores.softmax(-1).to(value.dtype) @ value
        return cast(Tensor, attn.to_out[0](attended.transpose(1, 2).flatten(2)))


class FastTransformer:
    """The transformer as it is trained: what the stock one says of text padded to 512 tokens, for the cost of a few."""

    def __init__(self, transformer: WanTransformer3DModel) -> None:
        self.transformer, self._cross = transformer, FewTokens()
        for block in transformer.blocks:
            block.attn1.set_processor(PlainAttention())
            block.attn2.set_processor(self._cross)

    def __call__(self, x: Tensor, sigma: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        """v at x for B sigmas; `text` is `encode_text` of the padded `ids`."""
        valid = ids != 0
        count = valid.sum(1, keepdim=True)
        place = torch.arange(ids.shape[1], device=ids.device)
        padding = torch.log((TEXT_TOKENS - count).float())
        self._cross.weight = torch.where(valid, 0.0, torch.where(place == count, padding, -math.inf))
        return cast(
            Tensor,
            self.transformer(hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=text, return_dict=False)[0],
        )
