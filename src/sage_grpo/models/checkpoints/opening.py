"""How a family opens its checkpoint: everything that can be refused is, before weights are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sage_grpo.models.checkpoints.checkpoint import check_components, has_component, load_pipeline, read_index, resolve
from sage_grpo.models.devices import load_dtypes
from sage_grpo.models.guidance import check_guidance
from sage_grpo.models.schedulers import check_scheduler
from sage_grpo.models.spec import ModelError, ModelSpec
from sage_grpo.models.traits import Traits


def open_folder(
    spec: ModelSpec, traits: Traits, pipelines: Sequence[str] | None, components: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint of one of the pipelines (None takes any) and its index, with its components, scheduler and guidance
    checked."""
    folder = resolve(spec)
    index = read_index(folder)
    if pipelines is not None and index["_class_name"] not in pipelines:
        raise ModelError(
            f'"{folder}" holds a {index["_class_name"]}, but this family serves {", ".join(pipelines)}. Leave model.family out to '
            "read it from the checkpoint."
        )
    check_components(folder, index, ["transformer", "vae", "scheduler", *components], ["transformer", "vae"])
    check_scheduler(folder, index, even=traits.even_sigmas, dynamic=traits.dynamic_shift)
    check_guidance(spec, folder, index)
    for name, (least, most) in traits.whole.items():
        value = spec.options.get(name, least)
        if not least <= value <= most or value != int(value):
            end = "" if most == math.inf else f" to {most}"
            raise ModelError(f"model.options {name} is a whole number from {least}{end}, got {value:g}.")
    return folder, index


def open_pipeline(
    spec: ModelSpec,
    traits: Traits,
    folder: Path,
    index: dict[str, Any],
    device: str | torch.device | None,
    *,
    pipeline: str | None = None,
    trained: str = "transformer",
) -> Any:
    """The stock pipeline of a checked folder, or another one that can run it, without its encoders; `trained` is the component to train."""
    import diffusers

    encoders = [name for name in traits.encoders if has_component(index, name)]
    kind = getattr(diffusers, pipeline or index["_class_name"])
    return load_pipeline(kind, folder, skip=encoders, dtypes=load_dtypes(spec, device, trained=trained))
