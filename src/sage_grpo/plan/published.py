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

    def write(self, folder: Path) -> None:
        pipeline, network, vae = COMPONENTS[self.family]
        index: dict[str, Any] = {"_class_name": pipeline, "boundary_ratio": self.boundary}
        index |= {"expand_timesteps": self.expand_timesteps, "vae": ["diffusers", vae]}
        index["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        contents = {"vae/config.json": self.vae, "scheduler/scheduler_config.json": self.scheduler}
        for name in ("transformer",) if self.boundary is None else ("transformer", "transformer_2"):
            index[name], contents[f"{name}/config.json"] = ["diffusers", network], self.transformer
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
