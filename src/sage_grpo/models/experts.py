"""The transformers of a pipeline: one, or two experts (Wan 2.2) of which each has the noise on its side of a boundary; and the files of their trained weights."""

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


class Experts:
    """The transformers of a pipeline, the trained ones among them, and their noise levels."""

    def __init__(self, spec: ModelSpec, index: Mapping[str, Any], pipe: Any) -> None:
        self._pipe, self._steps = pipe, float(pipe.scheduler.config.num_train_timesteps)
        self.boundary: float | None = index.get("boundary_ratio")
        """The noise level at which the second expert takes over; None for one network."""
        self.all = ("transformer",) if self.boundary is None else tuple(NOISE)
        """Components, the one for high noise first."""
        self.components = trained_components(spec, index)
        """Trained components: one, or both."""

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

    def of(self, component: str) -> Any:
        return getattr(self._pipe, component)

    def noise(self, component: str) -> lora.Expert:
        """The noise that a component is for; None for a model with one network."""
        return None if self.boundary is None else NOISE[component]

    def prefix(self, component: str) -> str:
        return f"{component}." if len(self.components) > 1 else ""

    def parameters(self) -> dict[str, nn.Parameter]:
        named = {self.prefix(name): one.named_parameters() for name, one in self.trained.items()}
        return {f"{prefix}{name}": parameter for prefix, pairs in named.items() for name, parameter in pairs}


def trained_components(spec: ModelSpec, index: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that are trained: of Wan 2.2's two experts the spec's, or both."""
    if index.get("boundary_ratio") is None:
        return ("transformer",)
    return tuple(name for name, noise in NOISE.items() if spec.expert in (noise, "both"))


def load_trained(experts: Experts, source: str | Path) -> None:
    """Add a saved LoRA, frozen; to both experts where it has one for each."""
    folder = pinned_folder(str(source), option="LoRA")
    components = experts.all if lora.has_both(folder) else experts.components
    for component in components:
        transformer = experts.of(component)
        subfolder = lora.folder_of(folder, component) if len(components) > 1 else folder
        lora.load_into(transformer, subfolder, expert=experts.noise(component))
        transformer.requires_grad_(False)


def save_trained(
    experts: Experts, folder: Path, weights: Mapping[str, Tensor], *, whole: bool
) -> tuple[dict[str, dict[str, Tensor]], lora.Merge]:
    """Write the LoRAs of the trained transformers, or, with `whole`, return their merged weights and the rounding of the merge.

    `weights` replaces parameters by name.
    """
    unknown = weights.keys() - experts.parameters().keys()
    if unknown:
        raise ModelError(f"save: the network has no parameter {sorted(unknown)[0]} ({len(unknown)} unknown names).")
    states, merge = {}, lora.Merge()
    for component, transformer in experts.trained.items():
        prefix = experts.prefix(component)
        parameters = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        if whole:
            states[component] = lora.merged_weights(transformer, parameters, merge)
        else:
            target = lora.folder_of(folder, component) if prefix else folder
            lora.save_lora(target, transformer, parameters, experts.noise(component))
    return states, merge
