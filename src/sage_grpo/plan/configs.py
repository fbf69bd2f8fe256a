"""Config files of published checkpoints that are not here, and models with random weights from them, to measure speed and memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.checkpoints.from_configs import assembled, family_class, plain, random_network
from sage_grpo.models.devices import DTYPES, choose_device, load_dtypes
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.spec import ModelSpec

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
    place, kind = choose_device(device), family_class(spec, COMPONENTS[family][0])
    dtypes = load_dtypes(spec, place)
    fewer = {} if layers is None else dict.fromkeys(kind.traits.blocks.values(), layers)

    def build(name: str, config: Mapping[str, Any]) -> Any:
        with torch.random.fork_rng(devices=[]), place:
            return random_network(name, config, dtypes["vae" if name.startswith("Autoencoder") else "transformer"])

    with tempfile.TemporaryDirectory() as folder:
        Configs(family=family, transformer={**plain(transformer), **fewer}, vae=plain(vae)).write(Path(folder))
        model = assembled(kind, spec, Path(folder), build, place)
    shapes = {name: one.shape for name, one in model._trial_inputs(text_tokens).items() if name != "guidance"}

    def encode(prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        return {name: torch.randn(shape).to(place, DTYPES[spec.dtype]) for name, shape in shapes.items()}

    model._encode = encode  # type: ignore[method-assign]
    model.place("network", place)
    return model
