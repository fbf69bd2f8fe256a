"""Tiny random checkpoints in the names of open_clip."""

from __future__ import annotations

import itertools

import torch
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
