"""LoRAs under the names that other programs load: ComfyUI, kohya's trainers (sd-scripts, musubi-tuner), LightX2V and peft.

A layer of another layout is one layer of diffusers', or several whose outputs it stacks (q, k and v in one matrix). The LoRA of a stack has the
halves A of its parts one above the other and their halves B as blocks on a diagonal, so that its product is the stack of theirs, exactly. Its rank
is the sum of theirs and its alpha grows alike, because these programs scale by alpha / rank. Layers keep their float values; no weight is rounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import PIPELINES
from sage_grpo.models.checkpoints.files import write_weights
from sage_grpo.models.lora import ADAPTER, is_lora
from sage_grpo.utils.safe_io import replace_text

Program = Literal["comfy", "kohya", "lightx2v", "peft"]
TITLES: Mapping[Program, str] = {
    "comfy": "ComfyUI",
    "kohya": "kohya's programs",
    "lightx2v": "LightX2V",
    "peft": "peft",
}

_HERE = resources.files("sage_grpo.models.checkpoints")
_TABLES = json.loads((_HERE / "lora_names.json").read_text())
LAYOUTS: Mapping[str, Mapping[str, list[str]]] = {
    **_TABLES["layouts"],
    "hunyuan15": json.loads((_HERE / "hunyuan15_layers.json").read_text()),
}
"""Layers of a layout, # for the number of a block, each with the layers of diffusers that it stacks."""
PROGRAMS: Mapping[str, Mapping[str, str | None]] = _TABLES["programs"]
"""The layout that a program has of a family; None is diffusers' own names of layers inside the repeated blocks."""

DOWN, UP = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
"""Ends of the names of a network's two halves."""
Halves = tuple[Tensor, Tensor]
"""A (rank x in) and B (out x rank) of one layer."""


def save_lora_for(program: Program, folder: Path, model: Any, weights: Mapping[str, Tensor]) -> list[Path]:
    """Write the LoRA of a family's model for a program; `weights` replaces parameters by name. One file for each trained network: Wan 2.2's are
    named after the noise that they are for."""
    experts, family, written = model.experts, PIPELINES[model.index["_class_name"]], []
    for component, network in experts.trained.items():
        prefix = f"{component}." if len(experts.components) > 1 else ""
        noise = experts.noise(component)
        tensors = {
            name: weights.get(f"{prefix}{name}", parameter).detach().to("cpu")
            for name, parameter in network.named_parameters()
            if is_lora(name)
        }
        layers = [name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]
        halves = {layer: (tensors[f"{layer}{DOWN}"], tensors[f"{layer}{UP}"]) for layer in layers}
        config = network.peft_config[ADAPTER]
        if program == "peft":
            written.append(_save_peft(folder / component if noise else folder, config, halves))
            continue
        modules = network.named_modules()
        sizes = {name: module.out_features for name, module in modules if hasattr(module, "out_features")}
        renamed = rename(program, family, halves, sizes, model.traits.blocks)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"lora_{program}{f'_{noise}_noise' if noise else ''}.safetensors"
        written.append(_save(file, named(program, renamed, config.lora_alpha / config.r), config, family))
    return written


def rename(
    program: str, family: str, halves: Mapping[str, Halves], sizes: Mapping[str, int], blocks: tuple[str, ...]
) -> dict[str, Halves]:
    """The halves by a program's names of layers; `sizes` are the outputs of diffusers' layers, for parts of a stack without a LoRA."""
    known = PROGRAMS[program]
    title = TITLES[program]  # type: ignore[index]
    if family not in known:
        others = ", ".join(name for name, families in PROGRAMS.items() if family in families)
        raise ModelError(f"{title} would not load a LoRA of {family}. For it, --format is diffusers, peft, {others}.")
    name, inside = known[family], tuple(f"{block}." for block in blocks)
    if name is None:
        layout = {_pattern(layer): [_pattern(layer)] for layer in halves if layer.startswith(inside)}
    else:
        layout = dict(LAYOUTS[name])
    source = {part: (target, parts) for target, parts in layout.items() for part in parts}
    # Trainers of kohya's make adapters inside the blocks only, and drop or refuse a file's others.
    known_layers = {layer for layer in source if program != "kohya" or layer.startswith(inside)}
    if lost := sorted({_pattern(layer) for layer in halves} - known_layers):
        raise ModelError(
            f"{title}: no place for the LoRA of {', '.join(lost[:3])} in {family}. Nothing was written: train without these (model.lora.targets), or "
            "export to diffusers."
        )
    result: dict[str, Halves] = {}
    for layer in halves:
        target, parts = source[_pattern(layer)]
        number = _number(layer)
        full = target.replace("#", number)
        if full not in result:
            result[full] = _stack([part.replace("#", number) for part in parts], halves, sizes)
    return result


def _stack(parts: list[str], halves: Mapping[str, Halves], sizes: Mapping[str, int]) -> Halves:
    there = [halves[part] for part in parts if part in halves]
    if len(parts) == 1:
        return there[0]
    down = torch.cat([a for a, _ in there])
    up = down.new_zeros((sum(sizes[part] for part in parts), len(down)))
    row = column = 0
    for part in parts:
        if part in halves:
            b = halves[part][1]
            up[row : row + len(b), column : column + b.shape[1]] = b
            column += b.shape[1]
        row += sizes[part]
    return down, up


def named(program: str, halves: Mapping[str, Halves], scale: float) -> dict[str, Tensor]:
    """The tensors of a program's file: the halves and alpha of every layer."""
    tensors: dict[str, Tensor] = {}
    for layer, (down, up) in halves.items():
        stem = f"diffusion_model.{layer}" if program == "comfy" else layer
        if program == "kohya":
            stem = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{stem}.lora_down.weight"] = down.contiguous()
        tensors[f"{stem}.lora_up.weight"] = up.contiguous()
        tensors[f"{stem}.alpha"] = torch.tensor(scale * len(down))
    return tensors


def _save(file: Path, tensors: Mapping[str, Tensor], config: Any, family: str) -> Path:
    metadata = {"format": "pt", "ss_network_dim": f"{config.r}", "ss_network_alpha": f"{config.lora_alpha:g}"}
    write_weights(file, tensors, metadata | {"sage_grpo_family": family})
    return file


def _save_peft(folder: Path, config: Any, halves: Mapping[str, Halves]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "adapter_model.safetensors"
    tensors = {
        f"base_model.model.{layer}.lora_{side}.weight": half.contiguous()
        for layer, pair in halves.items()
        for side, half in zip("AB", pair)
    }
    write_weights(file, tensors, {"format": "pt"})
    fields = {"peft_type": "LORA", "r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(halves)}
    replace_text(folder / "adapter_config.json", json.dumps(fields, indent=2) + "\n")
    return file


def _pattern(layer: str) -> str:
    return re.sub(r"\.\d+\.", ".#.", layer, count=1)


def _number(layer: str) -> str:
    found = re.search(r"\.(\d+)\.", layer)
    return found[1] if found else ""
