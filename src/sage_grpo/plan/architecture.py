"""Architecture of a model from its config files alone: those of a folder, of the hub's cache, or of a published
checkpoint that the package knows. Nothing is downloaded and no weights are read."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_grpo.models import ModelError, lora
from sage_grpo.models.checkpoints.checkpoint import local_folder
from sage_grpo.models.checkpoints.from_configs import weightless
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import first_given
from sage_grpo.models.spec import FAMILIES, ModelSpec
from sage_grpo.plan.counting import count_blocks, count_decoder
from sage_grpo.plan.formulas import HUNYUAN15, HUNYUAN15_VAE, NetworkShape, Vae
from sage_grpo.plan.published import PUBLISHED, Configs
from sage_grpo.samplers.schedule import Schedule

WAN_VAE = Vae(
    parameters=126_892_531,
    flops=8.55e6,
    working=1830.0,
    graph=8300.0,
    past=4730.0,
    efficiency=0.184,
    efficiency_float32=0.116,
)
WAN = dataclasses.replace(
    HUNYUAN15,
    saved_full=100.0,
    saved_lora=67.0,
    saved_compiled=56.0,  # 54.8 measured at 480 x 832 x 81 (research/benchmarks/results/side_by_side_h200.jsonl)
    working=30.0,
    moved=630.0,
    moved_compiled=320.0,
)
"""Measurements of Wan; products, pairs and the VAE are those of the model that is planned."""
MEASURED: Mapping[str, NetworkShape] = {"hunyuan15": HUNYUAN15, "wan": WAN}
"""Families with blocks measured on a GPU. The others use Wan's speeds, and their bytes are counted."""
DECODERS: Mapping[str, tuple[Vae, Callable[[Any], float]]] = {
    "AutoencoderKLHunyuanVideo15": (HUNYUAN15_VAE, lambda config: config.block_out_channels[0] / 128),
    "AutoencoderKLWan": (WAN_VAE, lambda config: first_given(config.decoder_base_dim, config.base_dim) / 96),
}
"""Measured VAEs, with the width of another one of the class relative to the measured."""
SAVED_FULL, SAVED_LORA = 1.2, 0.8
"""Bytes that blocks keep on CUDA, relative to the count without a GPU: 1.22 and 0.81 for HunyuanVideo-1.5, 1.09 and
0.73 for Wan."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The properties of a model that a plan and its costs depend on."""

    family: str
    source: str  # source of the numbers, as text
    model: FamilyModel  # the model without weights

    @cached_property
    def network(self) -> NetworkShape:
        return _network(self.model, MEASURED.get(self.family))

    @classmethod
    def of(cls, model: FamilyModel, source: str) -> Architecture:
        family = type(model).__module__.rpartition(".")[2]
        return cls(family=family, source=source, model=model)

    @property
    def estimated(self) -> bool:
        return self.family not in MEASURED

    @property
    def guidance_scale(self) -> float:
        """Scale of classifier-free guidance; 1 if it is an input of the network."""
        return 1.0 if self.model.guidance.embedded else self.model.guidance_scale

    def grid(self, steps: int, shift: float | None = None) -> Schedule:
        return Schedule(self.model.sigmas(steps, shift))


def find_architecture(spec: ModelSpec) -> Architecture:
    """The architecture of a spec; raises a ModelError if its config files are not known on this machine."""
    if spec.family is not None and spec.family not in FAMILIES:
        raise ModelError(
            f"model.family {spec.family!r} is your own: memory and time are known for the families of the package only "
            f"({', '.join(FAMILIES)})."
        )
    folder = local_folder(spec)
    if folder is not None:
        source = f"the config files of {folder}" if spec.path else "the package's own checkpoint"
        return Architecture.of(weightless(spec, folder), source)
    name = str(spec.path).rsplit("/", 1)[-1]
    if name in PUBLISHED:
        return build_architecture(spec, PUBLISHED[name], source=f"the published {name}")
    raise ModelError(
        f'model.path "{spec.path}" is not on this machine and is none of the published checkpoints that this command knows '
        f"({', '.join(PUBLISHED)}). Its config files are enough: hf download {spec.path} --include '*.json'"
    )


def build_architecture(spec: ModelSpec, configs: Configs, *, source: str) -> Architecture:
    with tempfile.TemporaryDirectory() as folder:
        configs.write(Path(folder))
        return Architecture.of(weightless(spec, Path(folder)), source)


def _network(model: FamilyModel, measured: NetworkShape | None) -> NetworkShape:
    """Parameters of the cost formulas: counted on the model, or measured for its family, else for Wan."""
    grid, blocks, both = model.grid, model.blocks(), len(model.experts.components) > 1
    width = math.prod(model.heads)
    sizes = {name: parameter.numel() for name, parameter in model.transformer.named_parameters()}
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    names = lora.match_targets(model.transformer, model.traits.lora_targets, model.traits.blocks, model.unread)
    adapted = [model.transformer.get_submodule(name).weight.shape for name in names]
    run = count_blocks(model)
    known = measured or dataclasses.replace(
        WAN, saved_full=SAVED_FULL * run.saved, saved_lora=SAVED_LORA * run.saved, saved_compiled=None
    )
    return dataclasses.replace(
        known,
        blocks=len(blocks),
        width=width,
        heads=model.heads[0],
        block_parameters=inside / len(blocks),
        other_parameters=sum(sizes.values()) - inside,
        unread_parameters=sum(sizes[name] for name in model.unread),
        frozen_parameters=0 if both else sum(p.numel() for other in model.others for p in other.parameters()),
        trained_networks=len(model.experts.components),
        lora_width=sum(map(sum, adapted)) / len(blocks),
        lora_weights=sum(map(math.prod, adapted)) / len(blocks),
        patch=((grid.temporal or 1) * grid.patch[0], grid.spatial * grid.patch[1], grid.spatial * grid.patch[2]),
        video_products=run.video_products,
        text_products=run.text_products,
        pairs=run.pairs,
        vae=_decoder(model),
    )


def _decoder(model: FamilyModel) -> Vae:
    """Parameters of a VAE: measured for its class and scaled to its width, or counted with the speed of Wan's."""
    vae, video = model.pipe.vae, model.video
    if type(vae).__name__ not in DECODERS:
        run, parameters = count_decoder(model), sum(parameter.numel() for parameter in vae.parameters())
        return Vae(
            parameters=parameters,
            flops=run.operations,
            working=run.working,
            frames=model.grid.temporal or 1,
            pixels_at_once=run.at_once,
            efficiency=WAN_VAE.efficiency,
            efficiency_float32=WAN_VAE.efficiency_float32,
        )
    known, width = DECODERS[type(vae).__name__]
    known = _scaled(known, width(vae.config), vae.config.get("patch_size") or 1)
    chunk = model.options.get("decode_chunk")
    if chunk is None:
        return known
    return dataclasses.replace(known, pixels_at_once=round(chunk * known.frames * video.height * video.width))


def _scaled(vae: Vae, width: float, patch: int) -> Vae:
    """A VAE of another width: operations and parameters grow with its square, memory with the width itself."""
    area = patch**2
    return dataclasses.replace(
        vae,
        parameters=round(vae.parameters * width**2),
        flops=vae.flops * width**2 / area,
        working=vae.working * width / area,
        graph=vae.graph * width / area,
        past=vae.past * width / area,
    )
