"""Published checkpoints as their config files describe them: the table of docs/models.md, for tests that build tiny ones alike.

Facts are read from published files and from diffusers' conversion scripts; the document says which. A tiny checkpoint has the pipeline, the
scheduler, the guider and the entries of model_index.json and transformer/config.json that are stated here, and a folder of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tiny

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}
LTX_DYNAMIC = {
    **{"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1},
    **{"base_image_seq_len": 1024, "max_image_seq_len": 4096},
}
FLUX_DEV = {
    **{"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0},
    **{"base_image_seq_len": 256, "max_image_seq_len": 4096},
}
QWEN = {
    **{"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02},
    **{"base_image_seq_len": 256, "max_image_seq_len": 8192, "time_shift_type": "exponential"},
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A checkpoint, and what becomes of it here."""

    name: str
    """Its hub name without the owner."""
    pipeline: str
    """The class that model_index.json names."""
    scheduler: tuple[str, Mapping[str, Any]] | None = None
    """Class and settings; None where it has none or they were not looked up."""
    kind: str | None = None
    """The tiny checkpoint that stands for it; None where its pipeline is refused by name."""
    verdict: Literal["accepted", "warns", "refused"] = "accepted"
    """With default settings."""
    words: str = ""
    """A part of the warning or the refusal."""
    guider: float | None = None
    index: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> str:
        """The scheduler in the words of the document."""
        if self.scheduler is None:
            return ""
        kind, settings = self.scheduler
        if kind != "FlowMatchEulerDiscreteScheduler":
            return f"{'UniPC' if kind.startswith('UniPC') else 'DPM-Solver++'}, flow_shift {settings['flow_shift']:g}"
        words = f"FlowMatchEuler, shift {settings.get('shift', 1.0):g}"
        if settings.get("use_dynamic_shifting"):
            low, high = settings["base_image_seq_len"], settings["max_image_seq_len"]
            words = (
                f"FlowMatchEuler, mu {settings['base_shift']:g} to {settings['max_shift']:g} at {low} to {high} tokens"
            )
        terminal = settings.get("shift_terminal")
        return words + (f", last sigma {terminal:g}" if terminal else "")

    def build(self, checkpoint: Callable[[str], Path], root: Path) -> Path:
        """The tiny checkpoint in exactly this configuration; of a pipeline that is refused by name only its index."""
        import diffusers

        folder = root / self.name
        if self.kind is None:
            folder.mkdir()
            (folder / "model_index.json").write_text(json.dumps({"_class_name": self.pipeline}))
            return folder
        parts: dict[str, Any] = {}
        if self.scheduler is not None:
            parts["scheduler"] = getattr(diffusers, self.scheduler[0])(**self.scheduler[1])
        if self.guider is not None:
            parts["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=self.guider)
        tiny.variant(checkpoint(self.kind), folder, **parts)
        changed = {"model_index.json": {"_class_name": self.pipeline, **self.index}}
        for file, entries in (changed | {"transformer/config.json": dict(self.transformer)}).items():
            tiny.write(folder / file, {**json.loads((folder / file).read_text()), **entries})
        return folder


def _euler(**settings: Any) -> tuple[str, dict[str, Any]]:
    return "FlowMatchEulerDiscreteScheduler", settings


def _unipc(shift: float) -> tuple[str, dict[str, Any]]:
    return "UniPCMultistepScheduler", {**FLOW, "flow_shift": shift}


def _hunyuan15(variant: str, shift: float, guider: float, **more: Any) -> Published:
    image = "i2v" in variant
    return Published(
        name=f"HunyuanVideo-1.5-Diffusers-{variant}",
        pipeline="HunyuanVideo15ImageToVideoPipeline" if image else "HunyuanVideo15Pipeline",
        scheduler=_euler(shift=shift),
        kind="hunyuan15_i2v" if image else "hunyuan15_t2v",
        guider=guider,
        **more,
    )


def _wan(name: str, kind: str, shift: float, **more: Any) -> Published:
    pipeline = "WanImageToVideoPipeline" if kind.endswith(("i2v", "flf2v")) else "WanPipeline"
    return Published(**{"name": name, "pipeline": pipeline, "scheduler": _unipc(shift), "kind": kind, **more})


def _ltx(version: str, kind: str, pipeline: str = "LTXConditionPipeline", **more: Any) -> Published:
    return Published(
        **{"name": f"LTX-Video{version}", "pipeline": pipeline, "scheduler": _euler(), "kind": kind, **more}
    )


def _refused(name: str, pipeline: str) -> Published:
    return Published(name=name, pipeline=pipeline, verdict="refused", words=f"holds a {pipeline}")


DISTILLED: dict[str, Any] = {"verdict": "warns", "words": "distilled checkpoint"}
DPM = ("DPMSolverMultistepScheduler", {**FLOW, "flow_shift": 8.0, "algorithm_type": "dpmsolver++"})
TABLE = (
    _hunyuan15("480p_t2v", 5.0, 6.0),
    _hunyuan15("720p_t2v", 9.0, 6.0),
    _hunyuan15("480p_i2v", 5.0, 6.0),
    _hunyuan15("720p_i2v", 7.0, 6.0),
    _hunyuan15("480p_t2v_distilled", 5.0, 1.0),
    _hunyuan15("480p_i2v_distilled", 5.0, 1.0),
    _hunyuan15("720p_i2v_distilled", 7.0, 1.0),
    _hunyuan15(
        "480p_i2v_step_distilled", 7.0, 1.0, verdict="refused", words="MeanFlow", transformer={"use_meanflow": True}
    ),
    Published(name="HunyuanVideo", pipeline="HunyuanVideoPipeline", scheduler=_euler(shift=7.0), kind="hunyuan"),
    _refused("HunyuanVideo-I2V", "HunyuanVideoImageToVideoPipeline"),
    _wan("Wan2.1-T2V-1.3B-Diffusers", "wan_t2v", 3.0),
    _wan("Wan2.1-T2V-14B-Diffusers", "wan_t2v", 3.0),
    _wan("Wan2.1-I2V-14B-480P-Diffusers", "wan_i2v", 3.0),
    _wan("Wan2.1-I2V-14B-720P-Diffusers", "wan_i2v", 3.0),
    _wan("Wan2.1-FLF2V-14B-720P-diffusers", "wan_flf2v", 16.0),
    _refused("Wan2.1-VACE-1.3B-diffusers", "WanVACEPipeline"),
    _refused("Wan2.1-VACE-14B-diffusers", "WanVACEPipeline"),
    _wan("Wan2.2-T2V-A14B-Diffusers", "wan22_t2v", 3.0, index={"boundary_ratio": 0.875}),
    _wan("Wan2.2-I2V-A14B-Diffusers", "wan22_i2v", 3.0, index={"boundary_ratio": 0.9}),
    _wan("Wan2.2-TI2V-5B-Diffusers", "wan22_5b_t2v", 5.0),
    _refused("Wan2.2-Animate-14B-Diffusers", "WanAnimatePipeline"),
    _ltx("", "ltx", "LTXPipeline", scheduler=_euler(**LTX_DYNAMIC)),
    _ltx("-0.9.1", "ltx_091", "LTXPipeline", scheduler=_euler(**LTX_DYNAMIC)),
    _ltx("-0.9.5", "ltx_condition", "LTXPipeline"),
    _ltx("-0.9.7-dev", "ltx_condition"),
    _ltx("-0.9.7-distilled", "ltx_condition", **DISTILLED),
    _ltx("-0.9.8-13B-distilled", "ltx_condition", **DISTILLED),
    _refused("ltxv-spatial-upscaler-0.9.7", "LTXLatentUpsamplePipeline"),
    Published(name="SANA-Video_2B_480p_diffusers", pipeline="SanaVideoPipeline", scheduler=DPM, kind="sana_video"),
    Published(name="SANA-Video_2B_720p_diffusers", pipeline="SanaVideoPipeline", scheduler=DPM, kind="sana_720p"),
    Published(
        name="SANA-Video_2B_480p_LongLive_diffusers",
        pipeline="SanaVideoPipeline",
        scheduler=DPM,
        kind="sana_video",
        verdict="refused",
        words="SanaVideoCausalTransformer3DModel",
        index={"transformer": ["diffusers", "SanaVideoCausalTransformer3DModel"]},
    ),
    Published(name="FLUX.1-dev", pipeline="FluxPipeline", scheduler=_euler(**FLUX_DEV), kind="flux"),
    Published(name="FLUX.1-schnell", pipeline="FluxPipeline", scheduler=_euler(shift=1.0), kind="flux_plain"),
    _refused("FLUX.1-Fill-dev", "FluxFillPipeline"),
    _refused("FLUX.1-Canny-dev", "FluxControlPipeline"),
    _refused("FLUX.1-Depth-dev", "FluxControlPipeline"),
    _refused("FLUX.1-Kontext-dev", "FluxKontextPipeline"),
    *(
        Published(
            name=f"stable-diffusion-{name}",
            pipeline="StableDiffusion3Pipeline",
            scheduler=_euler(shift=3.0),
            kind="sd3",
        )
        for name in ("3-medium-diffusers", "3.5-medium", "3.5-large")
    ),
    Published(
        name="stable-diffusion-3.5-large-turbo",
        pipeline="StableDiffusion3Pipeline",
        scheduler=_euler(shift=3.0),
        kind="sd3",
        **DISTILLED,
    ),
    *(
        Published(name=name, pipeline="QwenImagePipeline", scheduler=_euler(**QWEN), kind="qwen_image")
        for name in ("Qwen-Image", "Qwen-Image-2512")
    ),
    Published(
        name="Qwen-Image-Edit", pipeline="QwenImageEditPipeline", scheduler=_euler(**QWEN), kind="qwen_image_edit"
    ),
    _refused("Qwen-Image-Edit-2509", "QwenImageEditPlusPipeline"),
    _refused("Qwen-Image-2.1", "QwenImage21Pipeline"),
    Published(name="LTX-2", pipeline="LTX2Pipeline", scheduler=_euler(**LTX_DYNAMIC), kind="ltx2"),
    Published(name="LTX-2.3-Diffusers", pipeline="LTX2Pipeline", kind="ltx2_3"),
    Published(name="FLUX.2-klein-base-4B", pipeline="Flux2KleinPipeline", kind="flux2"),
    *(
        Published(
            name=f"FLUX.2-klein-{size}",
            pipeline="Flux2KleinPipeline",
            kind="flux2_distilled",
            index={"is_distilled": True},
        )
        for size in ("4B", "9B")
    ),
    _refused("FLUX.2-dev", "Flux2Pipeline"),
    Published(name="Z-Image", pipeline="ZImagePipeline", kind="z_image"),
    Published(
        name="Z-Image-Turbo", pipeline="ZImagePipeline", scheduler=_euler(shift=3.0), kind="z_image", **DISTILLED
    ),
)
