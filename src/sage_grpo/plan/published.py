"""Published checkpoints that `plan` knows without their files: their configurations and sampling grids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

<<<<<<< HEAD
=======
COMPONENTS: Mapping[str, tuple[str, str, str]] = {
    "hunyuan15": ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", "AutoencoderKLHunyuanVideo15"),
    "wan": ("WanPipeline", "WanTransformer3DModel", "AutoencoderKLWan"),
    "ltx": ("LTXPipeline", "LTXVideoTransformer3DModel", "AutoencoderKLLTXVideo"),
    "ltx2": ("LTX2Pipeline", "LTX2VideoTransformer3DModel", "AutoencoderKLLTX2Video"),
    "flux": ("FluxPipeline", "FluxTransformer2DModel", "AutoencoderKL"),
    "flux2": ("Flux2KleinPipeline", "Flux2Transformer2DModel", "AutoencoderKLFlux2"),
    "sd3": ("StableDiffusion3Pipeline", "SD3Transformer2DModel", "AutoencoderKL"),
    "qwen_image": ("QwenImagePipeline", "QwenImageTransformer2DModel", "AutoencoderKLQwenImage"),
    "z_image": ("ZImagePipeline", "ZImageTransformer2DModel", "AutoencoderKL"),
}
"""Pipeline, transformer and VAE of checkpoints whose files are not here."""

>>>>>>> sm

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


<<<<<<< HEAD
_TABLE = json.loads((files("sage_grpo.plan") / "published.json").read_text())
COMPONENTS: Mapping[str, list[str]] = _TABLE["components"]
"""Pipeline, transformer and VAE of checkpoints whose files are not here, by family."""
PUBLISHED: Mapping[str, Configs] = {name: Configs(**row) for name, row in _TABLE["checkpoints"].items()}
=======
WAN_1_3B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
WAN_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
WAN_5B_VAE = {"z_dim": 48, "base_dim": 160, "decoder_base_dim": 256, "patch_size": 2, "scale_factor_spatial": 16}
IMAGE_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""VAE of FLUX.1, with the size of Stable Diffusion 3's and Z-Image's."""
KLEIN_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
SD35_LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}


def _unipc(shift: float) -> dict[str, Any]:
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 1000}
    return {"_class_name": "UniPCMultistepScheduler", "flow_shift": shift, "solver_order": 2, **flow}


def _euler(shift: float = 1.0, **settings: Any) -> dict[str, Any]:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": shift, **settings}


def _dynamic(base: float, most: float, tokens: tuple[int, int], **settings: Any) -> dict[str, Any]:
    """A shift that grows with the number of tokens."""
    bounds = {"base_image_seq_len": tokens[0], "max_image_seq_len": tokens[1]}
    return _euler(use_dynamic_shifting=True, base_shift=base, max_shift=most, **bounds, **settings)


LTX_GRID = _dynamic(0.95, 2.05, (1024, 4096), shift_terminal=0.1)
FLUX_GRID = _dynamic(0.5, 1.15, (256, 4096), shift=3.0)
QWEN_GRID = _dynamic(0.5, 0.9, (256, 8192), shift_terminal=0.02)
LTX2_VAE = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
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
    "LTX-Video": Configs(family="ltx", scheduler=LTX_GRID),
    "LTX-2": Configs(family="ltx2", vae=LTX2_VAE, scheduler=LTX_GRID),
    "FLUX.1-dev": Configs(family="flux", transformer={"guidance_embeds": True}, vae=IMAGE_VAE, scheduler=FLUX_GRID),
    "FLUX.1-schnell": Configs(family="flux", vae=IMAGE_VAE, scheduler=_euler(1.0)),
    "FLUX.2-klein-base-4B": Configs(family="flux2", transformer=KLEIN_4B, scheduler=FLUX_GRID),
    "stable-diffusion-3.5-large": Configs(family="sd3", transformer=SD35_LARGE, vae=IMAGE_VAE, scheduler=_euler(3.0)),
    "Qwen-Image": Configs(family="qwen_image", scheduler=QWEN_GRID),
    "Z-Image-Turbo": Configs(family="z_image", vae=IMAGE_VAE, scheduler=_euler(3.0)),
}
>>>>>>> sm
"""Checkpoints by the last part of their hub names."""
