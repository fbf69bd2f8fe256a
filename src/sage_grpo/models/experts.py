"""The transformers of a pipeline: one, or two experts (Wan 2.2) of which each has the noise on its side of a boundary; their trained parameters (all
that a gradient reaches, or a LoRA), and the files of these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError, lora
from sage_grpo.models.spec import ModelSpec
from sage_grpo.utils.hub import pinned_folder

NOISE: Mapping[str, lora.Expert] = {"transformer": "high", "transformer_2": "low"}
"""Components of a model with two experts, by the noise that each is for."""
LAST = "LAST"
"""The last of the repeated blocks, in the names of `Traits.unread`."""


class Experts:
    """The transformers of a pipeline, the trained ones among them, and their noise levels."""

    def __init__(self, spec: ModelSpec, index: Mapping[str, Any], pipe: Any) -> None:
        self._pipe, self._steps = pipe, float(pipe.scheduler.config.num_train_timesteps)
        self.boundary: float | None = index.get("boundary_ratio")
        """The noise level at which the second expert takes over; None for one network."""
        self.all = ("transformer",) if self.boundary is None else tuple(NOISE)
        """Components, the one for high noise first."""
        self.components = trained_components(spec, index)

    def timestep(self, sigma: Tensor | float) -> Tensor:
        """The network's timestep in float32, for rollout and replay alike."""
        return torch.as_tensor(sigma, dtype=torch.float32) * self._steps

    def at(self, sigma: Tensor | float) -> int:
        """Index in `all` of the transformer that runs at a noise level: 0 the one for high noise, or the only one."""
        if self.boundary is None:
            return 0
        return 0 if float(self.timestep(sigma)) >= self.boundary * self._steps else 1

    @property
    def trained(self) -> dict[str, Any]:
        return {name: getattr(self._pipe, name) for name in self.components}

    def noise(self, component: str) -> lora.Expert:
        return None if self.boundary is None else NOISE[component]

    def _prefix(self, component: str) -> str:
        return f"{component}." if len(self.components) > 1 else ""

    def parameters(self) -> dict[str, nn.Parameter]:
        named = {self._prefix(name): one.named_parameters() for name, one in self.trained.items()}
        return {f"{prefix}{name}": parameter for prefix, pairs in named.items() for name, parameter in pairs}

    def load(self, source: str | Path) -> None:
        folder = pinned_folder(str(source), option="LoRA")
        components = self.all if lora.has_both(folder) else self.components
        for component in components:
            transformer = getattr(self._pipe, component)
            subfolder = lora.folder_of(folder, component) if len(components) > 1 else folder
            lora.load_into(transformer, subfolder, expert=self.noise(component))
            transformer.requires_grad_(False)

    def save(
        self, folder: Path, weights: Mapping[str, Tensor], *, whole: bool
    ) -> tuple[dict[str, dict[str, Tensor]], lora.Merge]:
        """Write the LoRAs of the trained transformers, or, with `whole`, return their merged weights and the rounding of the merge. `weights`
        replaces parameters by name."""
        if unknown := weights.keys() - self.parameters().keys():
            raise ModelError(f"save: the network has no parameter {sorted(unknown)[0]} ({len(unknown)} unknown names).")
        states, merge = {}, lora.Merge()
        for component, transformer in self.trained.items():
            prefix = self._prefix(component)
            own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            if whole:
                states[component] = lora.merged_weights(transformer, own, merge)
            else:
                target = lora.folder_of(folder, component) if prefix else folder
                lora.save_lora(target, transformer, own, self.noise(component))
        return states, merge


def trained_components(spec: ModelSpec, index: Mapping[str, Any]) -> tuple[str, ...]:
    if index.get("boundary_ratio") is None:
        return ("transformer",)
    return tuple(name for name, noise in NOISE.items() if spec.expert in (noise, "both"))


def unread_parameters(model: Any, transformer: Any) -> set[str]:
    """Parameters of a transformer that never receive a gradient, those of optional inputs, such as quoted text, among them."""
    *_, blocks = model.traits.blocks
    last = f"{blocks}.{len(getattr(transformer, blocks)) - 1}"
    unread = tuple(name.replace(LAST, last) for name in (*model.traits.unread, *model.unused))
    return {name for name, _ in transformer.named_parameters() if name.startswith(unread)}


def prepare_training(model: Any) -> set[str]:
    """Freeze all but the trained parameters, and add the LoRA; returns the parameters of `transformer` that nothing reads."""
    spec, adapts = model.spec, model.spec.train or model.spec.lora is not None
    unread = unread_parameters(model, model.transformer) if adapts else set()
    for module in (*model.modules("network"), *model.modules("vae")):
        module.requires_grad_(False)
        module.eval()
    for component, transformer in model.experts.trained.items() if adapts else ():
        dead = unread if transformer is model.transformer else unread_parameters(model, transformer)
        if spec.lora is not None:
            names = lora.match_targets(transformer, model.lora_targets, model.traits.blocks, dead)
            lora.add_lora(transformer, spec.lora, names, model.experts.noise(component), dead)
        for name, parameter in transformer.named_parameters():
            trained = lora.is_lora(name) if spec.lora is not None else name not in dead
            parameter.requires_grad_(spec.train and trained)
    return unread
