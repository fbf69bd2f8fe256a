"""A model from its config files alone: without weights, for its sizes and names; or with random ones, to measure speed and memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import (
    PIPELINES,
    component_class,
    configs_folder,
    has_component,
    in_words,
    left_out,
    read_config,
    read_index,
)
from sage_grpo.models.devices import DTYPES, choose_device, load_dtypes
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.spec import LoraSpec, ModelSpec, find_family

Build = Callable[[str, Mapping[str, Any]], Any]
"""A network of a component ("transformer", "vae") and its configuration."""
COMPONENTS: Mapping[str, tuple[str, str, str]] = {
    "hunyuan15": ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", "AutoencoderKLHunyuanVideo15"),
    "wan": ("WanPipeline", "WanTransformer3DModel", "AutoencoderKLWan"),
    "ltx": ("LTXPipeline", "LTXVideoTransformer3DModel", "AutoencoderKLLTXVideo"),
    "ltx2": ("LTX2Pipeline", "LTX2VideoTransformer3DModel", "AutoencoderKLLTX2Video"),
    "hunyuan": ("HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", "AutoencoderKLHunyuanVideo"),
    "sana_video": ("SanaVideoPipeline", "SanaVideoTransformer3DModel", "AutoencoderKLWan"),
    "flux": ("FluxPipeline", "FluxTransformer2DModel", "AutoencoderKL"),
    "flux2": ("Flux2KleinPipeline", "Flux2Transformer2DModel", "AutoencoderKLFlux2"),
    "sd3": ("StableDiffusion3Pipeline", "SD3Transformer2DModel", "AutoencoderKL"),
    "qwen_image": ("QwenImagePipeline", "QwenImageTransformer2DModel", "AutoencoderKLQwenImage"),
    "qwen_image_edit": ("QwenImageEditPipeline", "QwenImageTransformer2DModel", "AutoencoderKLQwenImage"),
    "z_image": ("ZImagePipeline", "ZImageTransformer2DModel", "AutoencoderKL"),
}
"""Pipeline, transformer and VAE of checkpoints whose files are not here."""


@dataclass(frozen=True, kw_only=True)
class Configs:
    """The config files of a text-to-video checkpoint that is not here, as far as they define the model."""

    family: str
    scheduler: Mapping[str, Any] = field(
        default_factory=lambda: {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    )
    transformer: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] = field(default_factory=dict)
    guidance: float | None = None
    """Scale of its guider, where it has one."""
    boundary: float | None = None
    """Wan 2.2 with two experts: the noise level at which the second takes over."""
    expand_timesteps: bool = False
    """Wan 2.2 5B: every token has a timestep."""

    def write(self, folder: Path) -> None:
        """Write the config files as a checkpoint has them, without weights."""
        pipeline, network, vae = COMPONENTS[self.family]
        index: dict[str, Any] = {"_class_name": pipeline, "boundary_ratio": self.boundary}
        index |= {"expand_timesteps": self.expand_timesteps, "vae": ["diffusers", vae]}
        index["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        files = {"vae/config.json": self.vae, "scheduler/scheduler_config.json": self.scheduler}
        for name in ("transformer",) if self.boundary is None else ("transformer", "transformer_2"):
            index[name], files[f"{name}/config.json"] = ["diffusers", network], self.transformer
        if self.guidance is not None:
            index["guider"] = ["diffusers", "ClassifierFreeGuidance"]
            files["guider/guider_config.json"] = {"guidance_scale": self.guidance}
        for file, content in {"model_index.json": index, **files}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(json.dumps(content))


def weightless(spec: ModelSpec, folder: Path, *, lora: LoraSpec | None = None) -> FamilyModel:
    """The model of a folder of config files, on the meta device: it gives everything that needs no weights (sizes, sigmas, guidance,
    experts, parameters), as the loaded one does, and runs nothing. `lora` is added to networks that no other model shares."""
    index = read_index(folder)
    name = str(index["_class_name"])
    if name not in PIPELINES or spec.family not in (None, PIPELINES[name]):
        raise ModelError(f'"{folder}" holds a {name}; supported are {", ".join(PIPELINES)}.')
    asked = replace(spec, path=None, revision=None, family=None, cache=None, train=True, lora=lora)
    asked = replace(asked, compile=False, attention="auto", deterministic=False, vae_tiling=False)
    build = _shared if lora is None else _empty
    return _assembled(_class_of(spec, name), asked, folder, build, torch.device("meta"))


def adapter_alone(spec: ModelSpec) -> FamilyModel:
    """The model of a spec for the files of its LoRA: it names the adapter's weights, writes them and their card, and reads no others."""
    assert spec.lora is not None
    model = weightless(spec, configs_folder(spec), lora=replace(spec.lora, path=None))
    model.spec = spec  # the card names the origin of the model
    return model


def _class_of(spec: ModelSpec, pipeline: str) -> type[FamilyModel]:
    """The class of the family's module that runs a pipeline; a module with several has `kind_of`."""
    module = find_family(PIPELINES[pipeline])
    if hasattr(module, "kind_of"):
        return module.kind_of(spec, pipeline)
    classes = [kind for kind in vars(module).values() if isinstance(kind, type)]
    families = [kind for kind in classes if issubclass(kind, FamilyModel) and "traits" in vars(kind)]
    return next(kind for kind in families if pipeline in kind.traits.pipelines)


def _shared(name: str, config: Mapping[str, Any]) -> Any:
    """A network without storage, cached by its configuration as text: a plan needs the same one many times."""
    return _by_text(name, json.dumps(config, sort_keys=True))


@cache
def _by_text(name: str, config: str) -> Any:
    return _empty(name, json.loads(config))


def _empty(name: str, config: Mapping[str, Any]) -> Any:
    """A network without storage."""
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, name)(**config)


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
    """A model with random weights, built from config.json files; `layers` blocks of each kind instead of all. Prompts encode to random inputs."""
    place, kind = choose_device(device), _class_of(spec, COMPONENTS[family][0])
    dtypes = load_dtypes(spec, place)
    fewer = {} if layers is None else dict.fromkeys(kind.traits.blocks.values(), layers)

    def build(name: str, config: Mapping[str, Any]) -> Any:
        with torch.random.fork_rng(devices=[]), place:
            return _random(name, config, dtypes["vae" if name.startswith("Autoencoder") else "transformer"])

    with tempfile.TemporaryDirectory() as folder:
        Configs(family=family, transformer={**plain(transformer), **fewer}, vae=plain(vae)).write(Path(folder))
        model = _assembled(kind, spec, Path(folder), build, place)
    shapes = {name: one.shape for name, one in model._trial_inputs(text_tokens).items() if name != "guidance"}

    def encode(prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        return {name: torch.randn(shape).to(place, DTYPES[spec.dtype]) for name, shape in shapes.items()}

    model._encode = encode  # type: ignore[method-assign]
    model.place("network", place)
    return model


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a configuration, without diffusers' own entries."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _assembled(kind: Any, spec: ModelSpec, folder: Path, build: Build, device: torch.device) -> FamilyModel:
    """The family around a stock pipeline whose networks `build` makes; text encoders and tokenizers are left out."""
    import diffusers

    index = read_index(folder)
    parts: dict[str, Any] = {}
    for name in ("transformer", "transformer_2", "vae"):
        if has_component(index, name):
            component_class(folder, index, name)
            with in_words(folder, name):
                parts[name] = build(index[name][1], plain(read_config(folder, name)))
    with in_words(folder, "scheduler"):
        scheduler = component_class(folder, index, "scheduler")
        parts["scheduler"] = scheduler.from_config(read_config(folder, "scheduler", "scheduler_config.json"))
    pipeline = getattr(diffusers, kind._pipeline(index))
    pipe = pipeline(**{**dict.fromkeys(left_out(pipeline, {})), **parts})
    return kind(spec, folder, index, pipe, device=device)


def _random(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A network with random weights, as from_pretrained leaves it: in `dtype`, except modules that the class keeps in float32."""
    import diffusers

    kind, before = getattr(diffusers, name), torch.get_default_dtype()
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
