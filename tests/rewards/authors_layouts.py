"""Tiny random checkpoints in the names of open_clip and BLIP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.25
        norm = any(part in name for part in ("ln_", "norm", "LayerNorm")) and name.endswith("weight")
        state[name] = value + 1 if norm else value
    return state


def open_clip_state(width: int = 24, out: int = 16, inner: int = 32) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (1 + 3**2, width),
        "visual.conv1.weight": (width, 3, 10, 10),
        "visual.proj": (width, out),
        "positional_embedding": (40, width),
        "text_projection": (width, out),
        "token_embedding.weight": (514, width),
    }
    for name in ("visual.ln_pre", "visual.ln_post", "ln_final"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for tower, layer in itertools.product(("visual.transformer", "transformer"), range(2)):
        at = f"{tower}.resblocks.{layer}"
        shapes |= {f"{at}.attn.in_proj_weight": (3 * width, width), f"{at}.attn.in_proj_bias": (3 * width,)}
        for name, shape in (
            ("attn.out_proj", (width, width)),
            ("mlp.c_fc", (inner, width)),
            ("mlp.c_proj", (width, inner)),
        ):
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{norm}.weight": (width,), f"{at}.{norm}.bias": (width,)}
    return _random(shapes, seed=11)


def write_bert_tokenizer(folder: Path) -> Path:
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder


def write_imagereward(folder: Path, *, width: int = 128, text: int = 24, layers: int = 2) -> None:
    """A tiny ImageReward: blip.visual_encoder (timm's names), blip.text_encoder (BERT's) and mlp.layers, and med_config.json."""
    vocab, inner = 59, 40
    shapes: dict[str, tuple[int, ...]] = {
        "visual_encoder.cls_token": (1, 1, width),
        "visual_encoder.pos_embed": (1, 10, width),
        "visual_encoder.patch_embed.proj.weight": (width, 3, 8, 8),
        "visual_encoder.patch_embed.proj.bias": (width,),
        "visual_encoder.norm.weight": (width,),
        "visual_encoder.norm.bias": (width,),
        "vision_proj.weight": (4, width),  # for retrieval; no score uses it
        "text_encoder.embeddings.word_embeddings.weight": (vocab, text),
        "text_encoder.embeddings.position_embeddings.weight": (48, text),
        "text_encoder.embeddings.LayerNorm.weight": (text,),
        "text_encoder.embeddings.LayerNorm.bias": (text,),
    }
    for layer in range(layers):
        at = f"visual_encoder.blocks.{layer}"
        linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        linears |= {"mlp.fc1": (2 * width, width), "mlp.fc2": (width, 2 * width)}
        shapes |= {f"{at}.{norm}.{kind}": (width,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        at, cross = f"text_encoder.encoder.layer.{layer}", f"text_encoder.encoder.layer.{layer}.crossattention"
        dense = {f"{at}.attention.self.{name}": (text, text) for name in ("query", "key", "value")}
        dense |= {f"{cross}.self.query": (text, text)}
        dense |= {f"{cross}.self.{name}": (text, width) for name in ("key", "value")}
        dense |= {f"{at}.attention.output.dense": (text, text), f"{cross}.output.dense": (text, text)}
        dense |= {f"{at}.intermediate.dense": (inner, text), f"{at}.output.dense": (text, inner)}
        dense |= {f"visual_encoder.blocks.{layer}.{name}": shape for name, shape in linears.items()}
        for name, shape in dense.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        for name in (f"{at}.attention.output", f"{cross}.output", f"{at}.output"):
            shapes |= {f"{name}.LayerNorm.weight": (text,), f"{name}.LayerNorm.bias": (text,)}
    shapes = {f"blip.{name}": shape for name, shape in shapes.items()}
    sizes = [text, 12, 8, 6, 4, 1]
    for number, (before, after) in zip((0, 2, 4, 6, 7), itertools.pairwise(sizes)):
        shapes |= {f"mlp.layers.{number}.weight": (after, before), f"mlp.layers.{number}.bias": (after,)}
    state = _random(shapes, seed=12)
    buffer = {"blip.text_encoder.embeddings.position_ids": torch.arange(48).unsqueeze(0)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state | buffer, folder / "imagereward.safetensors")
    config = {"vocab_size": vocab, "hidden_size": text, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 48, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    config |= {"encoder_width": 768, "add_cross_attention": True, "architectures": ["BertModel"], "type_vocab_size": 2}
    (folder / "med_config.json").write_text(json.dumps(config))
