"""Tiny random checkpoints in the names of open_clip and BLIP, with plain forward passes over those names as references."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
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


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Softmax attention by hand; mask is added to the logits."""
    split = lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    q, k, v = split(query), split(key), split(value)
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return ((logits if mask is None else logits + mask).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state: State, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def open_clip_state(
    *, width: int = 24, layers: int = 2, out: int = 16, vocab: int = 514, length: int = 40, size: int = 30
) -> State:
    """A CLIP as open_clip saves it."""
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (1 + (size // 10) ** 2, width),
        "visual.conv1.weight": (width, 3, 10, 10),
        "visual.proj": (width, out),
        "positional_embedding": (length, width),
        "text_projection": (width, out),
        "token_embedding.weight": (vocab, width),
    }
    for name in ("visual.ln_pre", "visual.ln_post", "ln_final"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for tower in ("visual.transformer", "transformer"):
        for layer in range(layers):
            at = f"{tower}.resblocks.{layer}"
            shapes |= {f"{at}.attn.in_proj_weight": (3 * width, width), f"{at}.attn.in_proj_bias": (3 * width,)}
            shapes |= {f"{at}.attn.out_proj.weight": (width, width), f"{at}.attn.out_proj.bias": (width,)}
            shapes |= {f"{at}.mlp.c_fc.weight": (32, width), f"{at}.mlp.c_fc.bias": (32,)}
            shapes |= {f"{at}.mlp.c_proj.weight": (width, 32), f"{at}.mlp.c_proj.bias": (width,)}
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{at}.{norm}.weight": (width,), f"{at}.{norm}.bias": (width,)}
    return _random(shapes, seed=11)


def _open_clip_tower(state: State, tower: str, x: Tensor, mask: Tensor | None) -> Tensor:
    layer = 0
    while f"{tower}.resblocks.{layer}.ln_1.weight" in state:
        at = f"{tower}.resblocks.{layer}"
        y = _norm(state, f"{at}.ln_1", x, 1e-5)
        q, k, v = F.linear(y, state[f"{at}.attn.in_proj_weight"], state[f"{at}.attn.in_proj_bias"]).chunk(3, dim=-1)
        x = x + _linear(state, f"{at}.attn.out_proj", _attend(q, k, v, 2, mask))
        y = F.gelu(_linear(state, f"{at}.mlp.c_fc", _norm(state, f"{at}.ln_2", x, 1e-5)))
        x, layer = x + _linear(state, f"{at}.mlp.c_proj", y), layer + 1
    return x


def open_clip_image(state: State, pixels: Tensor) -> Tensor:
    """Unit embeddings of pictures."""
    patches = F.conv2d(pixels, state["visual.conv1.weight"], stride=10).flatten(2).transpose(1, 2)
    first = state["visual.class_embedding"].expand(len(pixels), 1, -1)
    x = torch.cat([first, patches], dim=1) + state["visual.positional_embedding"]
    x = _open_clip_tower(state, "visual.transformer", _norm(state, "visual.ln_pre", x, 1e-5), None)
    return F.normalize(_norm(state, "visual.ln_post", x[:, 0], 1e-5) @ state["visual.proj"], dim=-1)


def open_clip_text(state: State, ids: Tensor) -> Tensor:
    """Unit embeddings of texts, read at their last token, which has the highest id."""
    x = state["token_embedding.weight"][ids] + state["positional_embedding"][: ids.shape[1]]
    mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
    x = _norm(state, "ln_final", _open_clip_tower(state, "transformer", x, mask), 1e-5)
    return F.normalize(x[torch.arange(len(ids)), ids.argmax(dim=1)] @ state["text_projection"], dim=-1)


def write_bert_tokenizer(folder: Path) -> Path:
    """A BERT tokenizer that knows letters."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder


def write_imagereward(folder: Path, *, width: int = 128, text: int = 24, layers: int = 2) -> State:
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
    return state


def imagereward_raw(state: State, pixels: Tensor, ids: Tensor, mask: Tensor, heads: int = 2) -> Tensor:
    """The head's output for pictures and token ids, one by one as the authors compute it."""
    state = {name.removeprefix("blip."): value for name, value in state.items()}
    v = "visual_encoder"
    patches = F.conv2d(pixels, state[f"{v}.patch_embed.proj.weight"], state[f"{v}.patch_embed.proj.bias"], stride=8)
    x = torch.cat([state[f"{v}.cls_token"].expand(len(pixels), -1, -1), patches.flatten(2).transpose(1, 2)], dim=1)
    x = x + state[f"{v}.pos_embed"]
    layer = 0
    while f"{v}.blocks.{layer}.norm1.weight" in state:
        at = f"{v}.blocks.{layer}"
        q, k, value = _linear(state, f"{at}.attn.qkv", _norm(state, f"{at}.norm1", x, 1e-6)).chunk(3, dim=-1)
        x = x + _linear(state, f"{at}.attn.proj", _attend(q, k, value, x.shape[-1] // 64))
        inner = F.gelu(_linear(state, f"{at}.mlp.fc1", _norm(state, f"{at}.norm2", x, 1e-6)))
        x, layer = x + _linear(state, f"{at}.mlp.fc2", inner), layer + 1
    seen = _norm(state, f"{v}.norm", x, 1e-6)
    e = "text_encoder.embeddings"
    h = state[f"{e}.word_embeddings.weight"][ids] + state[f"{e}.position_embeddings.weight"][: ids.shape[1]]
    h, hidden, layer = _norm(state, f"{e}.LayerNorm", h, 1e-12), (1 - mask[:, None, None].float()) * -1e4, 0
    while f"text_encoder.encoder.layer.{layer}.output.dense.weight" in state:
        at = f"text_encoder.encoder.layer.{layer}"
        for kind, source, added in (("attention", None, hidden), ("crossattention", seen, None)):
            source = h if source is None else source
            q = _linear(state, f"{at}.{kind}.self.query", h)
            k, value = (_linear(state, f"{at}.{kind}.self.{name}", source) for name in ("key", "value"))
            out = _linear(state, f"{at}.{kind}.output.dense", _attend(q, k, value, heads, added))
            h = _norm(state, f"{at}.{kind}.output.LayerNorm", out + h, 1e-12)
        out = _linear(state, f"{at}.output.dense", F.gelu(_linear(state, f"{at}.intermediate.dense", h)))
        h, layer = _norm(state, f"{at}.output.LayerNorm", out + h, 1e-12), layer + 1
    values = h[:, 0]
    for number in (0, 2, 4, 6, 7):
        values = _linear(state, f"mlp.layers.{number}", values)
    return values.squeeze(-1)
