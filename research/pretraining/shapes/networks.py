"""The networks and the tokenizer of the miniature, all diffusers' and transformers' own classes, and fast ways to run them in training.

The fast ways use the very same modules and give the same numbers; they only leave out what costs time when all
captions of a batch have one length: masks, padding and loops over the batch. That of the transformer is the family's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.pretraining.shapes.options import Sizes
from sage_grpo.models.families.hunyuan15 import LAYERS_TO_SKIP, PackedTransformer, causal_mask, vae_attention
from sage_grpo.models.network.attention import PackedAttention

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel

PREFIX_LENGTH = 108
"""Tokens that the pipeline drops (its `prompt_template_encode_start_idx`): its system message sits there. The chat template here writes a prefix of
exactly that length whatever the message says, so what remains is one token a word and a closing token."""

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


def build_vae(sizes: Sizes) -> AutoencoderKLHunyuanVideo15:
    """A VAE that makes clips 8 times smaller in space and 4 times in time."""
    from diffusers import AutoencoderKLHunyuanVideo15

    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=sizes.latent_channels,
        block_out_channels=sizes.vae_channels,
        layers_per_block=sizes.vae_layers,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        scaling_factor=1.0,
    )
    return batched(vae)


def build_transformer(sizes: Sizes) -> HunyuanVideo15Transformer3DModel:
    """The velocity network. Its ByT5 branch has a fixed width of 2048; prompts never use it, so it is all zeros."""
    from diffusers import HunyuanVideo15Transformer3DModel

    axis = sizes.head_dim // 8
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * sizes.latent_channels + 1,
        out_channels=sizes.latent_channels,
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_dim,
        num_layers=sizes.blocks,
        num_refiner_layers=sizes.refiner_layers,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=sizes.text_width,
        text_embed_2_dim=16,
        image_embed_dim=8,
        rope_axes_dim=(2 * axis, 3 * axis, 3 * axis),
        target_size=32,
        task_type="t2v",
    )
    for linear in (module for module in transformer.context_embedder_2.modules() if isinstance(module, nn.Linear)):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    # A velocity of zero and gates of zero are a calm start (DiT's adaLN-zero).
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    for block in transformer.transformer_blocks:
        for norm in (block.norm1, block.norm1_context):
            nn.init.zeros_(norm.linear.weight)
            nn.init.zeros_(norm.linear.bias)
    return transformer


def build_text_encoder(sizes: Sizes, vocabulary: int, pad: int) -> Qwen2_5_VLTextModel:
    """The first text encoder: a tiny causal Qwen2.5-VL language model."""
    from transformers import Qwen2_5_VLTextModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    heads = 4
    section = sizes.text_width // heads // 2 // 3
    config = Qwen2_5_VLTextConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.text_width,
        intermediate_size=2 * sizes.text_width,
        num_hidden_layers=sizes.text_layers + LAYERS_TO_SKIP,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [section] * 3},
        bos_token_id=None,
        eos_token_id=pad,
        pad_token_id=None,
        use_cache=False,
    )
    model = Qwen2_5_VLTextModel(config)
    nn.init.normal_(model.embed_tokens.weight, std=0.5)
    return model


def build_text_encoder_2() -> T5EncoderModel:
    """The second text encoder, for quoted text: random and tiny, since no prompt of this world quotes anything."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config)


def batched(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """The VAE with a mask that is made at once and has no batch axis: the stock one takes one clip at a time."""
    for block in vae_attention(vae):
        block.prepare_causal_attention_mask = causal_mask
    return vae


def packed(transformer: HunyuanVideo15Transformer3DModel) -> PackedTransformer:
    """The transformer as it is trained and sampled, on captions of one length."""
    for block in transformer.transformer_blocks:
        block.attn.set_processor(PackedAttention())
    return PackedTransformer(transformer)


def encode_text(text_encoder: Qwen2_5_VLTextModel, prefix: Tensor, ids: Tensor) -> Tensor:
    """The states that the pipeline reads from the text encoder after its crop, B x L x D, for captions of ONE length.

    The prefix is the same for every caption and attention is causal, so it is run once and not B times.
    """
    hidden, constant = text_encoder.embed_tokens(ids), text_encoder.embed_tokens(prefix)[None]
    config = text_encoder.config
    length, total = len(prefix), len(prefix) + ids.shape[1]
    cos, sin = _text_rotary(config, total, hidden)
    look_back = torch.ones(ids.shape[1], total, dtype=torch.bool, device=ids.device).tril(length)
    for layer in text_encoder.layers[: config.num_hidden_layers - LAYERS_TO_SKIP]:
        attention, heads = layer.self_attn, config.num_attention_heads
        query, key, value = _heads(attention, layer.input_layernorm(hidden), heads)
        query_0, key_0, value_0 = _heads(attention, layer.input_layernorm(constant), heads)
        query, key = _rotate(query, cos[length:], sin[length:]), _rotate(key, cos[length:], sin[length:])
        query_0, key_0 = _rotate(query_0, cos[:length], sin[:length]), _rotate(key_0, cos[:length], sin[:length])
        key = torch.cat([key_0.expand(len(ids), -1, -1, -1), key], dim=2)
        value = torch.cat([value_0.expand(len(ids), -1, -1, -1), value], dim=2)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=look_back)
        seen_0 = F.scaled_dot_product_attention(query_0, key_0, value_0.contiguous(), is_causal=True)
        hidden = hidden + attention.o_proj(seen.transpose(1, 2).flatten(2))
        constant = constant + attention.o_proj(seen_0.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        constant = constant + layer.mlp(layer.post_attention_layernorm(constant))
    return hidden


def _heads(attention: Any, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (project(x).unflatten(-1, (heads, -1)).transpose(1, 2) for project in projections)
    return query, key, value


def _text_rotary(config: Qwen2_5_VLTextConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    # All three grids of Qwen2.5-VL's positions agree on plain text, so this is the ordinary rotary embedding.
    dim = config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, dim, 2, device=like.device, dtype=torch.float32) / dim
    angles = torch.arange(length, device=like.device)[:, None] / config.rope_parameters["rope_theta"] ** steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def velocity(network: PackedTransformer, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """v at x for B sigmas and B texts of one length: text to video, with an empty condition and a mask of zeros."""
    latents = torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1)
    return cast(Tensor, network(latents, sigma * 1000, text))


def used_parameters(
    transformer: HunyuanVideo15Transformer3DModel, text_encoder: Qwen2_5_VLTextModel
) -> dict[str, nn.Parameter]:
    """The parameters that text-to-video training reaches, by name ("transformer.…", "text_encoder.…")."""
    last = len(transformer.transformer_blocks) - 1
    unused = (
        "context_embedder_2.",
        "image_embedder.",
        f"transformer_blocks.{last}.attn.to_add_out.",
        f"transformer_blocks.{last}.ff_context.",
    )
    layers = text_encoder.config.num_hidden_layers
    unused_text = ("norm.", *(f"layers.{layers - 1 - i}." for i in range(LAYERS_TO_SKIP)))
    found = {f"transformer.{n}": p for n, p in transformer.named_parameters() if not n.startswith(unused)}
    found |= {f"text_encoder.{n}": p for n, p in text_encoder.named_parameters() if not n.startswith(unused_text)}
    return found


def build_tokenizer(words: Sequence[str]) -> Qwen2Tokenizer:
    """A byte-level Qwen2Tokenizer in which every word of the world is one token: its merges spell exactly these words; other words fall apart into bytes.

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
