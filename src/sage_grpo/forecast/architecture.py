"""What a model is made of, from its config files alone: those of a folder, of the hub's cache, or of a published checkpoint that the
package knows. Nothing is downloaded and no weights are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.checkpoints.checkpoint import PIPELINES, read_config, read_defaults, read_index, resolve
from sage_grpo.models.checkpoints.safety import read_json
from sage_grpo.models.errors import ModelError
from sage_grpo.models.families.flux import Flux
from sage_grpo.models.families.hunyuan import Hunyuan
from sage_grpo.models.families.hunyuan15 import Hunyuan15
from sage_grpo.models.families.ltx import Ltx, class_of
from sage_grpo.models.families.qwen_image import QwenImage
from sage_grpo.models.families.sana_video import SanaVideo
from sage_grpo.models.families.sd3 import Sd3
from sage_grpo.models.families.wan import TEXT_TOKENS, Wan
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.sizes import Grid, choose_video, first_given
from sage_grpo.models.schedulers import scheduler_shift
from sage_grpo.models.spec import ModelSpec
from sage_grpo.parallel.memory import HUNYUAN15, Network, Vae
from sage_grpo.types import VideoSpec

FAMILIES: Mapping[str, type[FamilyModel]] = {"hunyuan15": Hunyuan15, "wan": Wan}
UNMEASURED: Mapping[str, type[FamilyModel]] = {
    **{"ltx": Ltx, "hunyuan": Hunyuan, "sana_video": SanaVideo, "flux": Flux, "sd3": Sd3, "qwen_image": QwenImage}
}
"""Families whose costs are not known: a plan has their passes, but neither seconds nor memory."""
HUNYUAN_TEXT = 256
"""Text tokens of a HunyuanVideo-1.5 prompt, which is not padded: a long one."""
WAN_1_3B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
WAN_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
WAN_5B_VAE = {"z_dim": 48, "base_dim": 160, "decoder_base_dim": 256, "patch_size": 2, "scale_factor_spatial": 16}


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the config files of a published checkpoint say, as far as costs depend on it."""

    family: str
    transformer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vae: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: Mapping[str, Any]
    guidance: float | None = None
    video: Mapping[str, float] = dataclasses.field(default_factory=dict)
    boundary: float | None = None


def _unipc(shift: float) -> dict[str, Any]:
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 1000}
    return {"_class_name": "UniPCMultistepScheduler", "flow_shift": shift, "solver_order": 2, **flow}


def _euler(shift: float) -> dict[str, Any]:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": shift}


PUBLISHED: Mapping[str, Published] = {
    "HunyuanVideo-1.5-Diffusers-480p_t2v": Published(family="hunyuan15", scheduler=_euler(5.0), guidance=6.0),
    "HunyuanVideo-1.5-Diffusers-720p_t2v": Published(
        family="hunyuan15", scheduler=_euler(9.0), guidance=6.0, video={"height": 720, "width": 1280}
    ),
    "Wan2.1-T2V-1.3B-Diffusers": Published(family="wan", transformer=WAN_1_3B, scheduler=_unipc(3.0)),
    "Wan2.1-T2V-14B-Diffusers": Published(family="wan", transformer=WAN_14B, scheduler=_unipc(3.0)),
    "Wan2.2-T2V-A14B-Diffusers": Published(family="wan", transformer=WAN_14B, scheduler=_unipc(3.0), boundary=0.875),
    "Wan2.2-TI2V-5B-Diffusers": Published(
        family="wan",
        transformer=WAN_5B,
        vae=WAN_5B_VAE,
        scheduler=_unipc(5.0),
        video={"frames": 121, "height": 704, "width": 1280, "fps": 24.0},
    ),
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
    video: VideoSpec | None
    guidance_scale: float
    shift: float
    text_tokens: int = 0
    network: Network | None = None
    """None where the family's costs are not known."""
    boundary: float | None = None
    """Wan 2.2 with two experts: the sigma at which the second takes over."""
    scheduler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The checkpoint's scheduler_config.json; empty for an even grid."""
    transformer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The transformer's config.json."""
    vae: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The VAE's config.json."""
    model: type[FamilyModel] | None = None
    """What runs it; None for a family of your own."""
    folder: Path | None = None
    """Where its files are; None where they are not on this machine."""

    def trains(self, sigma: float) -> bool:
        """Whether the trained network runs at sigma."""
        return self.boundary is None or self._high(sigma) == (self.spec.expert == "high")

    def _high(self, sigma: float) -> bool:
        """Rounded as the model does."""
        return self.boundary is None or float(torch.tensor(sigma, dtype=torch.float32) * 1000) >= self.boundary * 1000

    def branches(self, sigma: float, guidance: float | None = None) -> int:
        """Forward passes of one velocity; `guidance` overrides the model's scale."""
        second = self.spec.guidance_scale_2
        late = second is not None and not self._high(sigma)
        scale = first_given(guidance, second if late else self.guidance_scale)
        return 1 if scale == 1 else 2

    def grid(self, steps: int, shift: float | None = None) -> Schedule:
        """The sigmas that the model is sampled on."""
        shift = self.shift if shift is None else shift
        if not self.scheduler or self.model is None:
            return Schedule.shifted(steps, shift)
        return Schedule(self.model.sigmas_of(self.scheduler, steps, shift))


def find_architecture(spec: ModelSpec) -> Architecture:
    """The architecture of a spec; ModelError where nothing on this machine tells it."""
    if spec.family is not None and spec.family not in {**FAMILIES, **UNMEASURED}:
        return Architecture(
            family=str(spec.family),
            source="a family of your own",
            spec=spec,
            video=None,
            guidance_scale=float(first_given(spec.guidance_scale, 1.0)),
            shift=float(first_given(spec.shift, 1.0)),
        )
    folder = _local(spec)
    if folder is not None:
        return _from_folder(spec, folder)
    name = str(spec.path).rsplit("/", 1)[-1]
    if name in PUBLISHED:
        return build_architecture(spec, PUBLISHED[name], source=f"the published {name}")
    raise ModelError(
        f'model.path "{spec.path}" is not on this machine and is none of the published checkpoints that this command knows '
        f"({', '.join(PUBLISHED)}). Its config files are enough: hf download {spec.path} --include '*.json'"
    )


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


def _from_folder(spec: ModelSpec, folder: Path) -> Architecture:
    index = read_index(folder)
    name = str(index.get("_class_name"))
    family = first_given(spec.family, PIPELINES.get(name, ""))
    if family in UNMEASURED:
        return _unmeasured(spec, folder, family)
    if family not in FAMILIES:
        raise ModelError(f'"{folder}" holds a {name}; supported are {", ".join(PIPELINES)}.')
    scheduler = _json(folder / "scheduler" / "scheduler_config.json")
    guider = _json(folder / "guider" / "guider_config.json")
    guidance = None
    if guider:
        scale = float(guider.get("guidance_scale", 7.5)) + bool(guider.get("use_original_formulation", False))
        guidance = scale if guider.get("enabled", True) else 1.0
    defaults = read_defaults(folder)
    known = Published(
        family=family,
        transformer=read_config(folder, "transformer"),
        vae=read_config(folder, "vae"),
        scheduler=scheduler,
        guidance=guidance,
        video=defaults,
        boundary=index.get("boundary_ratio"),
    )
    found = build_architecture(
        spec, known, source=f"the config files of {folder}" if spec.path else "the package's own checkpoint"
    )
    return dataclasses.replace(found, folder=folder)


def _unmeasured(spec: ModelSpec, folder: Path, family: str) -> Architecture:
    """As far as config files tell."""
    model = class_of(str(read_index(folder)["_class_name"])) if family == "ltx" else UNMEASURED[family]
    traits, scheduler, defaults = (
        model.traits,
        _json(folder / "scheduler" / "scheduler_config.json"),
        read_defaults(folder),
    )
    scale = float(first_given(spec.guidance_scale, 1.0 if traits.embeds_guidance else traits.guidance_scale))
    if traits.embeds_guidance and read_config(folder, "transformer").get("guidance_embeds"):
        scale = 1.0  # an input of the network: one pass
    video = choose_video(spec, defaults, traits.video)
    shift = scheduler_shift(scheduler, _tokens(family, folder, video) if scheduler.get("use_dynamic_shifting") else 0)
    return Architecture(
        family=family,
        model=model,
        scheduler=scheduler,
        source=f"the config files of {folder}; its costs are not known",
        spec=spec,
        folder=folder,
        video=None,
        guidance_scale=scale,
        shift=float(first_given(spec.shift, defaults.get("shift"), shift, 1.0)),
    )


def _tokens(family: str, folder: Path, video: VideoSpec) -> int:
    """Tokens of a clip of a family whose shift grows with them, as its pipeline counts."""
    vae, frames = read_config(folder, "vae"), 1
    if family == "ltx":
        halvings = 2 ** sum(vae.get("spatio_temporal_scaling", (True, True, True, False)))
        side = vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * halvings
        frames = (video.frames - 1) // (
            vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * halvings
        ) + 1
    elif family == "qwen_image":
        side = 2 * 2 ** len(vae.get("temperal_downsample", (False, True, True)))
    else:
        side = 2 ** len(vae.get("block_out_channels", (0, 0, 0, 0)))  # one halving less, and tokens of 2 x 2
    return frames * (video.height // side) * (video.width // side)


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def build_architecture(spec: ModelSpec, known: Published, *, source: str) -> Architecture:
    """The architecture of config files."""
    traits = FAMILIES[known.family].traits
    network = _hunyuan(known) if known.family == "hunyuan15" else _wan(known)
    if known.boundary is not None:
        network = dataclasses.replace(network, frozen_parameters=network.parameters)
    video, (temporal, spatial, _) = choose_video(spec, known.video, traits.video), network.patch
    Grid(channels=1, temporal=temporal, spatial=spatial).check(video)
    return Architecture(
        family=known.family,
        model=FAMILIES[known.family],
        source=source,
        spec=spec,
        video=video,
        guidance_scale=float(first_given(spec.guidance_scale, known.guidance, traits.guidance_scale)),
        shift=float(
            first_given(
                spec.shift,
                known.video.get("shift"),
                known.scheduler.get("shift"),
                known.scheduler.get("flow_shift"),
                1.0,
            )
        ),
        scheduler=known.scheduler,
        transformer=known.transformer,
        vae=known.vae,
        text_tokens=HUNYUAN_TEXT if known.family == "hunyuan15" else TEXT_TOKENS,
        network=network,
        boundary=known.boundary,
    )


def _hunyuan(known: Published) -> Network:
    c = {
        **{"num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54, "num_refiner_layers": 2},
        **{"mlp_ratio": 4.0, "patch_size": 1, "patch_size_t": 1, "in_channels": 65, "out_channels": 32},
        **{"text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152},
        **known.transformer,
    }
    d, inner = c["num_attention_heads"] * c["attention_head_dim"], c["mlp_ratio"]
    head, text, glyphs, image = (
        c["attention_head_dim"],
        c["text_embed_dim"],
        c["text_embed_2_dim"],
        c["image_embed_dim"],
    )
    # Two streams of modulation, attention and feed-forward, each with biases, and norms of q and k.
    block = round(2 * ((6 + 4 + 2 * inner) * d * d + (6 + 4 + inner + 1) * d + 2 * head))
    refiner = (4 + 2 + 8) * d * d + (4 + 4 + 2 + 4 + 1) * d  # whose feed-forward is always four times as wide
    timestep = 256 * d + d + d * d + d
    other = 2 * timestep + (text * d + d) + (text * d + d + d * d + d) + c["num_refiner_layers"] * refiner
    unread = 2 * glyphs + glyphs * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * d + d  # quoted text
    unread += 2 * image + image * image + image + image * d + d + 2 * d  # a picture
    other += unread
    unread += (
        round((2 + 2 * inner) * d * d + (3 + inner) * d) + head
    )  # what the last block makes of the text, and its queries
    volume = c["patch_size"] ** 2 * c["patch_size_t"]
    other += c["in_channels"] * volume * d + d + 2 * d * d + 2 * d + c["out_channels"] * volume * (d + 1) + 3 * d
    v = {"spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "block_out_channels": [128], **known.vae}
    spatial, temporal = v["spatial_compression_ratio"], v["temporal_compression_ratio"]
    return dataclasses.replace(
        HUNYUAN15,
        blocks=c["num_layers"],
        width=d,
        heads=c["num_attention_heads"],
        block_parameters=block,
        other_parameters=round(other),
        unread_parameters=unread,
        lora_width=round((16 + 4 * (1 + inner)) * d),
        patch=(temporal * c["patch_size_t"], spatial * c["patch_size"], spatial * c["patch_size"]),
        channels=c["out_channels"],
        positions=volume,
        feed_forward=inner,
        vae=_scaled(HUNYUAN15.vae, v["block_out_channels"][0] / 128),
    )


WAN_VAE = Vae(
    parameters=126_892_531,
    flops=8.55e6,
    working=3060.0,
    efficiency=0.184,
    efficiency_float32=0.116,
)


def _wan(known: Published) -> Network:
    c = {
        **{"patch_size": [1, 2, 2], "attention_head_dim": 128, "in_channels": 16, "out_channels": 16},
        **{"text_dim": 4096, "freq_dim": 256, "image_dim": None, "added_kv_proj_dim": None},
        **known.transformer,
    }
    d, f, volume = c["num_attention_heads"] * c["attention_head_dim"], c["ffn_dim"], math.prod(c["patch_size"])
    # Self- and cross-attention with norms of q and k, feed-forward, the norm before cross-attention, modulation.
    block = 8 * d * d + 8 * d + 4 * d + 2 * d * f + d + f + 2 * d + 6 * d
    if c["added_kv_proj_dim"]:
        block += 2 * (c["added_kv_proj_dim"] * d + d) + d
    other = c["in_channels"] * volume * d + d + c["out_channels"] * volume * (d + 1) + 2 * d
    other += c["freq_dim"] * d + d + d * d + d + 6 * d * d + 6 * d + c["text_dim"] * d + d + d * d + d
    if c["image_dim"]:
        other += 2 * c["image_dim"] + c["image_dim"] ** 2 + c["image_dim"] * (d + 1) + d + 2 * d
    v = {"base_dim": 96, "scale_factor_spatial": 8, "scale_factor_temporal": 4, "decoder_base_dim": None, **known.vae}
    spatial, temporal = v["scale_factor_spatial"], v["scale_factor_temporal"]
    patch = c["patch_size"]
    return Network(
        blocks=c["num_layers"],
        width=d,
        heads=c["num_attention_heads"],
        block_parameters=block,
        other_parameters=other,
        lora_width=16 * d + 2 * (d + f),
        patch=(temporal * patch[0], spatial * patch[1], spatial * patch[2]),
        channels=c["out_channels"],
        positions=volume,
        text_stream=False,
        feed_forward=f / d,
        saved_full=100.0,
        saved_lora=67.0,
        saved_compiled=56.0,  # 54.8 measured at 480 x 832 x 81 (benchmarks/results/side_by_side_h200.jsonl)
        working=30.0,
        moved=630.0,
        moved_compiled=320.0,
        vae=_scaled(WAN_VAE, first_given(v["decoder_base_dim"], v["base_dim"]) / 96, v.get("patch_size") or 1),
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
    network, video = architecture.network, architecture.video
    if network is None or video is None:
        return 0
    frames, height, width = network.patch
    count = ((video.frames - 1) // frames + 1) * (video.height // height) * (video.width // width)
    return count * network.positions * network.channels


def sigmas(schedule: Schedule) -> list[float]:
    """Where its steps start."""
    return torch.as_tensor(schedule.sigmas[:-1]).tolist()
