"""The encodings of prompts and pictures of a family, cached in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError, no_numbers
from sage_grpo.models.checkpoints.cache import EncodingCache, default_folder, digest, image_digest
from sage_grpo.models.checkpoints.checkpoint import fingerprint, has_component
from sage_grpo.models.network.inputs import check_image
from sage_grpo.types import Conditioning


def condition(model: Any, prompt: str, image: Tensor | None) -> Conditioning:
    check_image(image, model.pictures)
    key, negative = image_digest(image), None
    guided = model.guidance_scale != 1 or (model.spec.guidance_scale_2 or 1) != 1
    if guided and not model.guidance.embedded:
        negative = _inputs(model, model.spec.negative_prompt, image, key)
    tensors = _inputs(model, prompt, image, key)
    return model.conditions.setdefault((prompt, key), Conditioning(tensors, negative))


def _inputs(model: Any, prompt: str, image: Tensor | None, image_key: str) -> dict[str, Tensor]:
    def made() -> dict[str, Tensor]:
        with torch.no_grad():
            tensors = model._encode(prompt, image)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise no_numbers("What is encoded of a prompt", [*model.modules("text"), *model.modules("vae")])
        return tensors

    inputs = model.cache.get((prompt, image_key), made)
    for name, tensor in model.batchable(inputs).items():
        if not tensor.numel():
            raise ModelError(
                f'Nothing of the prompt {prompt!r} reaches the network (its input "{name}" has shape {tuple(tensor.shape)}): the '
                "checkpoint's tokenizer makes no token of it and adds none of its own. Give a prompt that is not empty (for the "
                "negative one model.negative_prompt), or a tokenizer that marks where a text begins or ends."
            )
    return inputs


def open_cache(model: Any) -> EncodingCache:
    """The cache of a model's encodings, keyed by all that they depend on."""
    if model.spec.cache is None:
        return EncodingCache(None, "")
    folder = default_folder() if model.spec.cache == "auto" else Path(model.spec.cache).expanduser()
    # Encoding depends on the configs of the sampling networks but not on their weights; it may read every other component.
    networks, index = model.experts.all, model.index
    files = ["model_index.json", *(f"{name}/config.json" for name in networks)]
    files += [name for name in index if has_component(index, name) and name not in (*networks, "scheduler")]
    # A picture is encoded at the clip's size.
    size = f"{model.video}/{model.pipe.vae.dtype}/{model.spec.vae_tiling}" if max(model.pictures) else ""
    code = f"{type(model).__module__}.{type(model).__name__}/{model.spec.dtype}"
    return EncodingCache(folder, digest(fingerprint(model.folder, files), code, size, model.reading))
