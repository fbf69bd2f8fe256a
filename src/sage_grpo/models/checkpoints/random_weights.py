"""A model of any size with random weights, made where it runs, without a file of weights: for measuring speed and memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.devices import DTYPES, choose_device, load_dtypes
from sage_grpo.models.families.hunyuan15 import Hunyuan15
from sage_grpo.models.families.wan import Wan
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.spec import ModelSpec

CLASSES = {
    "hunyuan15": ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", "AutoencoderKLHunyuanVideo15"),
    "wan": ("WanPipeline", "WanTransformer3DModel", "AutoencoderKLWan"),
}
WIDTHS = {"hunyuan15": "text_embed_dim", "wan": "text_dim"}
"""What a transformer calls the width of its text's embedding."""


def random_model(
    family: str,
    spec: ModelSpec,
    *,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    text_tokens: int,
    layers: int | None = None,
    device: str = "auto",
) -> FamilyModel:
    """Text-to-video, built from what config.json files say; `layers` blocks instead of all. Prompts encode to random text."""
    import diffusers

    pipeline, network, decoder = CLASSES[family]
    place = choose_device(device)
    dtypes = load_dtypes(spec, place)
    config = {**_arguments(transformer), **({} if layers is None else {"num_layers": layers})}
    with torch.random.fork_rng(devices=[]), place:
        made = _built(getattr(diffusers, network), config, dtypes["transformer"])
        own_vae = _built(getattr(diffusers, decoder), _arguments(vae), dtypes["vae"])
    names = {"text_encoder": None, "tokenizer": None}
    if family == "hunyuan15":
        names |= {"text_encoder_2": None, "tokenizer_2": None, "guider": diffusers.ClassifierFreeGuidance()}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)
    pipe = getattr(diffusers, pipeline)(transformer=made, vae=own_vae, scheduler=scheduler, **names)
    index = {"_class_name": pipeline}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model_index.json").write_text(json.dumps(index))
        model: FamilyModel = (Hunyuan15 if family == "hunyuan15" else Wan)(spec, Path(folder), index, pipe, place)
    width = made.config[WIDTHS[family]]

    def encode(prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        return {"text": torch.randn(text_tokens, width).to(place, DTYPES[spec.dtype])}

    model._encode = encode  # type: ignore[method-assign]
    model.place("network", place)
    return model


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _built(kind: Any, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """As from_pretrained leaves it: in `dtype`, but for what the class keeps in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = kind(**config)
    finally:
        torch.set_default_dtype(before)
    kept = kind._keep_in_fp32_modules or []
    for name, parameter in module.named_parameters():
        if any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.float()
    return module.eval()
