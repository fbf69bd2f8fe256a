"""A published checkpoint with random weights, written as a diffusers folder, and its clips in stock diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.checkpoints.checkpoint import TOKENIZERS, read_index
from sage_grpo.models.checkpoints.files import LIBRARIES, STEMS
from sage_grpo.models.lora import ADAPTER, FILE, PREFIX, folder_of
from sage_grpo.tools.rehearse.weights import END, RandomPart, make_tokenizer
from sage_grpo.types import VideoSpec
from sage_grpo.utils.pretrained import from_pretrained

TEMPLATE_TOKENS = 108  # that HunyuanVideo-1.5's pipeline crops from the beginning
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    + END * TEMPLATE_TOKENS
    + "{{ message['content'] }}"
    + END * 3
    + "{% endif %}{% endfor %}"
)


def networks_of(folder: Path, components: Mapping[str, Sequence[Any]]) -> list[RandomPart]:
    """The networks of a folder, without storage; `components` are library, class and, of networks, configuration."""
    return [_network(folder / name, *entry) for name, entry in components.items() if len(entry) == 3]


def _network(folder: Path, library: str, name: str, config: Mapping[str, Any]) -> RandomPart:
    kind = getattr(import_module(LIBRARIES[library]), name)
    with torch.device("meta"):
        if library == "transformers":
            network = kind(kind.config_class(**config))
            return RandomPart(folder, network, STEMS[1], network.config.save_pretrained)
        network = kind(**config)
    return RandomPart(folder, network, STEMS[0], network.save_config)


def add_tokenizers(folder: Path, components: Mapping[str, Sequence[Any]], networks: Sequence[RandomPart]) -> None:
    """Write the tokenizers beside their text encoders, and an index that names all components."""
    index = {name: entry for name, entry in read_index(folder).items() if entry}
    index |= {name: list(entry[:2]) for name, entry in components.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    networks_by_name: dict[str, Any] = {part.folder.name: part.network for part in networks}
    for name in TOKENIZERS.keys() & components.keys():
        config, kind = networks_by_name[TOKENIZERS[name]].config, components[name][1]
        tokenizer = make_tokenizer(kind, config.get_text_config().vocab_size)
        if kind == "Qwen2Tokenizer":
            tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / name)


def compare_in_stock(
    base: Path, export: Path, components: Sequence[str], call: Mapping[str, Any], device: torch.device, dtype: Any
) -> tuple[Tensor, Tensor]:
    """The first output of the stock transformer before and after training: of `base`, and of `base` with the exported LoRA in diffusers' own
    loader, or of `export` where it is a whole folder. `call` are arguments of a pipeline's call."""
    from diffusers import DiffusionPipeline

    pipe = from_pretrained(DiffusionPipeline, base, dtype=dtype).to(device)
    before = _first_output(pipe, call)
    if (export / "model_index.json").is_file():
        del pipe
        pipe = from_pretrained(DiffusionPipeline, export, dtype=dtype).to(device)
    else:
        for component in components:
            place = folder_of(export, component) if len(components) > 1 else export
            getattr(pipe, component).load_lora_adapter(place, prefix=PREFIX, weight_name=FILE, adapter_name=ADAPTER)
    return before, _first_output(pipe, call)


def call_of(pipeline: str, prompt: str, video: VideoSpec) -> dict[str, Any]:
    """Arguments for two steps of a stock pipeline without guidance."""
    import diffusers

    known = signature(getattr(diffusers, pipeline).__call__).parameters
    sizes = {"height": video.height, "width": video.width, "num_frames": video.frames, "frame_rate": video.fps}
    asked = {"prompt": prompt, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent", **sizes}
    return {name: value for name, value in asked.items() if name in known}


def _first_output(pipe: Any, call: Mapping[str, Any]) -> Tensor:
    outputs: list[Tensor] = []
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe, "guider"):
        pipe.guider.guidance_scale = 1.0
    hook = pipe.transformer.register_forward_hook(lambda module, given, output: outputs.append(output[0].float().cpu()))
    try:
        with torch.no_grad():
            pipe(**call, generator=torch.Generator().manual_seed(0))
    finally:
        hook.remove()
    return outputs[0]
