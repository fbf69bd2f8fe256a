"""What a model is made of, from its config files alone: those of a folder, of the hub's cache, or of a published checkpoint that the
package knows. Nothing is downloaded and no weights are read."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_grpo.flow.schedule import Schedule
from sage_grpo.models import ModelError, lora
from sage_grpo.models.checkpoints.checkpoint import resolve
from sage_grpo.models.checkpoints.from_configs import Configs, weightless
from sage_grpo.models.families.hunyuan15 import Hunyuan15
from sage_grpo.models.families.ltx2 import Ltx2
from sage_grpo.models.families.wan import Wan
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import first_given
from sage_grpo.models.spec import FAMILIES, ModelSpec
from sage_grpo.parallel.formulas import HUNYUAN15, Network, Vae
from sage_grpo.types import VideoSpec

WAN_1_3B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
WAN_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
WAN_5B_VAE = {"z_dim": 48, "base_dim": 160, "decoder_base_dim": 256, "patch_size": 2, "scale_factor_spatial": 16}
WAN = dataclasses.replace(
    HUNYUAN15,
    text_stream=False,
    saved_full=100.0,
    saved_lora=67.0,
    saved_compiled=56.0,  # 54.8 measured at 480 x 832 x 81 (benchmarks/results/side_by_side_h200.jsonl)
    working=30.0,
    moved=630.0,
    moved_compiled=320.0,
    vae=Vae(
        parameters=126_892_531,
        flops=8.55e6,
        working=3060.0,
        graph=8300.0,
        past=4730.0,
        efficiency=0.184,
        efficiency_float32=0.116,
    ),
)
"""What was measured of Wan; sizes are counted on each network."""
LTX2 = dataclasses.replace(
    WAN,
    saved_full=170.0,
    saved_lora=106.0,
    saved_compiled=None,
    vae=Vae(
        parameters=1_222_479_601,
        flops=1.27e6,
        working=170.0,
        frames=8,
        pixels_at_once=2**40,  # it is not cut into chunks
        efficiency=0.184,
        efficiency_float32=0.116,
    ),
)
"""LTX-2, of which nothing was measured. Operations and what blocks keep were counted on the meta device (where Wan's blocks count a third above what
was measured of them), and what decoding holds twice as much as counted. The rest, speeds among it, is Wan's."""
LTX2_BETWEEN = 1.0
"""What the attention between picture and sound multiplies, as a share of the width that the feed-forward layers have. (The sound's own tokens are few.)"""


def _unipc(shift: float) -> dict[str, Any]:
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 1000}
    return {"_class_name": "UniPCMultistepScheduler", "flow_shift": shift, "solver_order": 2, **flow}


def _euler(shift: float) -> dict[str, Any]:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": shift}


LTX2_VAE = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
LTX2_SCHEDULER = {
    **{
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "shift_terminal": 0.1,
    },
    **{"base_image_seq_len": 1024, "max_image_seq_len": 4096},
}
PUBLISHED: Mapping[str, Configs] = {
    "HunyuanVideo-1.5-Diffusers-480p_t2v": Configs(family="hunyuan15", scheduler=_euler(5.0), guidance=6.0),
    "HunyuanVideo-1.5-Diffusers-720p_t2v": Configs(
        family="hunyuan15", scheduler=_euler(9.0), guidance=6.0, transformer={"target_size": 960}
    ),
    "Wan2.1-T2V-1.3B-Diffusers": Configs(family="wan", transformer=WAN_1_3B, scheduler=_unipc(3.0)),
    "Wan2.1-T2V-14B-Diffusers": Configs(family="wan", transformer=WAN_14B, scheduler=_unipc(3.0)),
    "Wan2.2-T2V-A14B-Diffusers": Configs(family="wan", transformer=WAN_14B, scheduler=_unipc(3.0), boundary=0.875),
    "Wan2.2-TI2V-5B-Diffusers": Configs(
        family="wan", transformer=WAN_5B, vae=WAN_5B_VAE, scheduler=_unipc(5.0), expand_timesteps=True
    ),
    "LTX-2": Configs(family="ltx2", vae=LTX2_VAE, scheduler=LTX2_SCHEDULER),
}
"""By the last part of their hub names."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, as far as a plan and its costs depend on it."""

    family: str
    """A family that ships with the package, or the import path of another."""
    source: str
    """Where the figures come from, in words."""
    spec: ModelSpec
    model: FamilyModel | None = None
    """The model itself, without weights; None for a family of your own."""
    network: Network | None = None
    """None where the family's costs are not known."""
    folder: Path | None = None
    """Where its files are; None where they are not on this machine."""

    @property
    def video(self) -> VideoSpec | None:
        """Format of its clips, where costs are known."""
        return None if self.model is None or self.network is None else self.model.video

    @property
    def text_tokens(self) -> int:
        """Tokens of a prompt; 0 where costs are not known."""
        return 0 if self.model is None else self.model.traits.text_tokens

    @property
    def guidance_scale(self) -> float:
        """Scale of classifier-free guidance; 1 where it is an input of the network."""
        if self.model is None:
            return float(first_given(self.spec.guidance_scale, 1.0))
        return 1.0 if self.model.guidance.embedded else self.model.guidance_scale

    @property
    def shift(self) -> float:
        """Shift of the noise schedule."""
        return float(first_given(self.spec.shift, 1.0)) if self.model is None else self.model.shift

    def trains(self, sigma: float) -> bool:
        """Whether the trained network runs at sigma."""
        return self.model is None or self.model.trains(sigma)

    def network_at(self, sigma: float) -> int:
        """Which network runs at sigma."""
        return 0 if self.model is None else self.model.network_at(sigma)

    def branches(self, sigma: float, guidance: float | None = None) -> int:
        """Forward passes of one velocity; `guidance` overrides the model's scale."""
        if self.model is None:
            return 1 if first_given(guidance, self.guidance_scale) == 1 else 2
        return self.model.branches(sigma, guidance)

    def grid(self, steps: int, shift: float | None = None) -> Schedule:
        """The sigmas that the model is sampled on."""
        if self.model is None:
            return Schedule.shifted(steps, first_given(shift, self.shift))
        return Schedule(self.model.sigmas(steps, shift))


def find_architecture(spec: ModelSpec) -> Architecture:
    """The architecture of a spec; ModelError where nothing on this machine tells it."""
    if spec.family is not None and spec.family not in FAMILIES:
        return Architecture(family=str(spec.family), source="a family of your own", spec=spec)
    folder = _local(spec)
    if folder is not None:
        source = f"the config files of {folder}" if spec.path else "the package's own checkpoint"
        return dataclasses.replace(_architecture(spec, folder, source), folder=folder)
    name = str(spec.path).rsplit("/", 1)[-1]
    if name in PUBLISHED:
        return build_architecture(spec, PUBLISHED[name], source=f"the published {name}")
    raise ModelError(
        f'model.path "{spec.path}" is not on this machine and is none of the published checkpoints that this command knows '
        f"({', '.join(PUBLISHED)}). Its config files are enough: hf download {spec.path} --include '*.json'"
    )


def build_architecture(spec: ModelSpec, configs: Configs, *, source: str) -> Architecture:
    """The architecture of config files that are not here."""
    with tempfile.TemporaryDirectory() as folder:
        configs.write(Path(folder))
        return _architecture(spec, Path(folder), source)


def _architecture(spec: ModelSpec, folder: Path, source: str) -> Architecture:
    model = weightless(spec, folder)
    network = _network(model)
    family = type(model).__module__.rpartition(".")[2]
    told = source if network is not None else f"{source}; its costs are not known"
    return Architecture(family=family, source=told, spec=spec, model=model, network=network)


def _local(spec: ModelSpec) -> Path | None:
    """The checkpoint's folder, if it is here: as a path, or in the hub's cache."""
    if spec.path in (None, "shapes") or Path(str(spec.path)).expanduser().is_dir():
        return resolve(spec)
    if str(spec.path).count("/") != 1 or str(spec.path).startswith((".", "/", "~")):
        return resolve(spec)  # says what is wrong with the path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(spec.path), "transformer/config.json", revision=spec.revision)
    index = try_to_load_from_cache(str(spec.path), "model_index.json", revision=spec.revision)
    return Path(index).parent if isinstance(index, str) and isinstance(found, str) else None


def _network(model: FamilyModel) -> Network | None:
    """What the formulas need to know of a network: counted on the model, and what was measured of its family."""
    config, vae = model.transformer.config, model.pipe.vae.config
    width = math.prod(model.heads)
    if isinstance(model, Hunyuan15):
        measured, feed_forward = HUNYUAN15, config.mlp_ratio
        decoder = _scaled(HUNYUAN15.vae, vae.block_out_channels[0] / 128)
        chunk = model.options["decode_chunk"]
        if decoder is not None and chunk is not None:
            pixels = round(chunk * decoder.frames * model.video.height * model.video.width)
            decoder = dataclasses.replace(decoder, pixels_at_once=pixels)
    elif isinstance(model, Wan):
        measured, feed_forward = WAN, config.ffn_dim / width
        decoder = _scaled(WAN.vae, first_given(vae.decoder_base_dim, vae.base_dim) / 96, vae.patch_size or 1)
    elif isinstance(model, Ltx2):
        measured, feed_forward, decoder = LTX2, 4.0 + LTX2_BETWEEN, LTX2.vae
    else:
        return None
    grid, blocks, both = model.grid, model.blocks(), len(model.experts.components) > 1
    sizes = {name: parameter.numel() for name, parameter in model.transformer.named_parameters()}
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    adapted = lora.match_targets(blocks[0], model.traits.lora_targets, ())
    return dataclasses.replace(
        measured,
        blocks=len(blocks),
        width=width,
        heads=model.heads[0],
        block_parameters=block,
        other_parameters=sum(sizes.values()) - len(blocks) * block,
        unread_parameters=sum(sizes[name] for name in model.unread),
        frozen_parameters=0 if both else sum(p.numel() for other in model.others for p in other.parameters()),
        trained_networks=len(model.experts.components),
        lora_width=sum(sum(blocks[0].get_parameter(f"{name}.weight").shape) for name in adapted),
        patch=((grid.temporal or 1) * grid.patch[0], grid.spatial * grid.patch[1], grid.spatial * grid.patch[2]),
        channels=grid.channels,
        positions=math.prod(grid.patch),
        feed_forward=feed_forward,
        vae=decoder,
    )


def _scaled(vae: Vae | None, width: float, patch: int = 1) -> Vae | None:
    """A VAE of another width: operations and parameters go by its square, what is held by the width itself."""
    if vae is None or (width == 1 and patch == 1):
        return vae
    area = patch**2
    return dataclasses.replace(
        vae,
        parameters=round(vae.parameters * width**2),
        flops=vae.flops * width**2 / area,
        working=vae.working * width / area,
    )


def latent_elements(architecture: Architecture) -> int:
    """Numbers in one clip's latents; 0 where that is not known."""
    if architecture.model is None or architecture.network is None:
        return 0
    return math.prod(architecture.model.latent_shape())


def sigmas(schedule: Schedule) -> list[float]:
    """Where its steps start."""
    return torch.as_tensor(schedule.sigmas[:-1]).tolist()
