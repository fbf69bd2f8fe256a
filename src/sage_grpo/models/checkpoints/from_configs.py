"""A model from its config files alone, without weights: for its sizes and names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints import checkpoint
from sage_grpo.models.checkpoints.checkpoint import PIPELINES, in_words, read_config
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.spec import LoraSpec, ModelSpec, find_family

Build = Callable[[str, Mapping[str, Any]], Any]  # A network of a component ("transformer", "vae") and its configuration


def weightless(spec: ModelSpec, folder: Path, *, lora: LoraSpec | None = None) -> FamilyModel:
    """The model of a folder of config files, on the meta device: it gives all that needs no weights (sizes, sigmas, guidance, experts,
    parameters), as the loaded one does. `lora` is added to networks that no other model shares."""
    index = checkpoint.read_index(folder)
    name = str(index["_class_name"])
    if name not in PIPELINES or spec.family not in (None, PIPELINES[name]):
        raise ModelError(f'"{folder}" holds a {name}; supported are {", ".join(PIPELINES)}.')
    asked = replace(spec, path=None, revision=None, family=None, cache=None, train=True, lora=lora)
    asked = replace(asked, compile=False, attention="auto", deterministic=False, vae_tiling=False)

    def build(name: str, config: Mapping[str, Any]) -> Any:
        return _empty(name, config) if lora else _shared(name, json.dumps(config, sort_keys=True))

    return assembled(family_class(name), asked, folder, build, torch.device("meta"))


def adapter_alone(spec: ModelSpec) -> FamilyModel:
    """The model of a spec for the files of its LoRA: it names the adapter's weights, and writes them and their card."""
    assert spec.lora is not None
    model = weightless(spec, checkpoint.configs_folder(spec), lora=replace(spec.lora, path=None))
    model.spec = spec  # the card names the origin of the model
    return model


def family_class(pipeline: str) -> type[FamilyModel]:
    module = find_family(PIPELINES[pipeline])
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, FamilyModel)]
    return next(kind for kind in classes if "traits" in vars(kind) and pipeline in kind.traits.pipelines)


def _empty(name: str, config: Mapping[str, Any]) -> Any:
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, name)(**config)


@cache
def _shared(name: str, config: str) -> Any:
    return _empty(name, json.loads(config))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def assembled(kind: Any, spec: ModelSpec, folder: Path, build: Build, device: torch.device) -> FamilyModel:
    """The family around a stock pipeline whose networks `build` makes; text encoders and tokenizers are left out."""
    import diffusers

    index = checkpoint.read_index(folder)
    parts: dict[str, Any] = {}
    for name in ("transformer", "transformer_2", "vae"):
        if checkpoint.has_component(index, name):
            checkpoint.component_class(folder, index, name)
            with in_words(folder, name):
                parts[name] = build(index[name][1], plain(read_config(folder, name)))
    with in_words(folder, "scheduler"):
        scheduler = checkpoint.component_class(folder, index, "scheduler")
        parts["scheduler"] = scheduler.from_config(read_config(folder, "scheduler", "scheduler_config.json"))
    pipeline = getattr(diffusers, kind._pipeline(index))
    return kind(
        spec, folder, index, pipeline(**dict.fromkeys(checkpoint.left_out(pipeline, {})) | parts), device=device
    )
