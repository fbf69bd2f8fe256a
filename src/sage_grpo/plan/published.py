"""Published checkpoints that `plan` knows without their files: their configurations and sampling grids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Configs:
    """The config files of a text-to-video checkpoint that is not here, as far as they define the model."""

    family: str
    scheduler: Mapping[str, Any] = field(
        default_factory=lambda: {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    )
    transformer: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] = field(default_factory=dict)
    guidance: float | None = None  # scale of its guider, where it has one
    boundary: float | None = None  # Wan 2.2 with two experts: the noise level at which the second takes over
    expand_timesteps: bool = False  # Wan 2.2 5B: every token has a timestep

    def networks(self) -> dict[str, list[Any]]:
        """Library, class and configuration of transformers and VAE by component."""
        _, network, vae = COMPONENTS[self.family]
        names = ("transformer",) if self.boundary is None else ("transformer", "transformer_2")
        return {name: ["diffusers", network, self.transformer] for name in names} | {
            "vae": ["diffusers", vae, self.vae]
        }

    def write(self, folder: Path) -> None:
        networks = self.networks()
        index: dict[str, Any] = {"_class_name": COMPONENTS[self.family][0], "boundary_ratio": self.boundary}
        index |= {"expand_timesteps": self.expand_timesteps, **{name: entry[:2] for name, entry in networks.items()}}
        index["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        contents = {f"{name}/config.json": entry[2] for name, entry in networks.items()}
        contents["scheduler/scheduler_config.json"] = self.scheduler
        if self.guidance is not None:
            index["guider"] = ["diffusers", "ClassifierFreeGuidance"]
            contents["guider/guider_config.json"] = {"guidance_scale": self.guidance}
        for file, content in {"model_index.json": index, **contents}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(json.dumps(content))


_TABLE = json.loads((files("sage_grpo.plan") / "published.json").read_text())
COMPONENTS: Mapping[str, list[str]] = _TABLE["components"]
"""Pipeline, transformer and VAE of checkpoints whose files are not here, by family."""
PUBLISHED: Mapping[str, Configs] = {name: Configs(**row) for name, row in _TABLE["checkpoints"].items()}
"""Checkpoints by the last part of their hub names."""
BESIDE: Mapping[str, Mapping[str, list[Any]]] = _TABLE["beside"]
"""Further components by family: library, class and, of networks, configuration. Only a rehearsal needs them."""
SMALL: Mapping[str, Mapping[str, Any]] = _TABLE["small"]
"""Configurations of a few thousand parameters, by family and component."""
