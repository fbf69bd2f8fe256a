"""Put the parts together as an ordinary HunyuanVideo15Pipeline folder, and take them apart again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sage_grpo.inside import replace_text
from sage_grpo.shapes.making.networks import build_text_encoder_2

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer

SHARD = "10MB"
"""Largest weight file; larger networks are split, which the loaders understand."""


def save_pipeline(
    folder: Path,
    *,
    vae: AutoencoderKLHunyuanVideo15,
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    shift: float,
    video: Mapping[str, float],
) -> None:
    """Write the pipeline in half precision; an earlier folder of that name is replaced.

    video: frames, height, width and fps that the model was made for, which video.json tells its users.
    """
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer

    pipe = HunyuanVideo15Pipeline(
        text_encoder=_half_copy(text_encoder),
        tokenizer=tokenizer,
        transformer=_half_copy(transformer),
        vae=_half_copy(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder_2=build_text_encoder_2().half(),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipe.save_pretrained(temporary, max_shard_size=SHARD)
    _tidy_configs(temporary)
    (temporary / "video.json").write_text(json.dumps({**video, "shift": shift}) + "\n")
    for path in temporary.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def load_pipeline(folder: Path, device: torch.device) -> HunyuanVideo15Pipeline:
    """The pipeline of a folder in single precision."""
    from diffusers import HunyuanVideo15Pipeline

    pipe = HunyuanVideo15Pipeline.from_pretrained(folder, local_files_only=True)
    pipe.vae.enable_slicing()  # the stock VAE takes one clip at a time
    return pipe.to(device, torch.float32)


def save_vae(vae: AutoencoderKLHunyuanVideo15, folder: Path) -> None:
    """Write the VAE alone, in single precision."""
    vae.save_pretrained(folder)


def load_vae(folder: Path, device: torch.device) -> AutoencoderKLHunyuanVideo15:
    """A VAE from its own folder or from a pipeline's."""
    from diffusers import AutoencoderKLHunyuanVideo15

    inner = folder / "vae" if (folder / "vae").is_dir() else folder
    if not (inner / "config.json").is_file():
        raise FileNotFoundError(f"No VAE in {folder}: expected config.json in it or in its folder vae/.")
    return AutoencoderKLHunyuanVideo15.from_pretrained(inner).to(device, torch.float32)


def folder_megabytes(folder: Path) -> float:
    """Size of all files in a folder, in units of 10^6 bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def write_card(folder: Path, *, table: str, facts: dict[str, object], command: str) -> None:
    """Write the model card: what it is, how it was made and how it scores."""
    listing = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"""---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags: [hunyuanvideo-1.5, miniature, synthetic]
---

# Shapes: a miniature HunyuanVideo-1.5

A complete `HunyuanVideo15Pipeline` of diffusers' own classes, small enough for a CPU. It draws clips of one moving
object (shape, colour, motion, speed, size, background) and was trained from scratch on rendered clips only. Its
training data are imperfect on purpose - wrong words in captions, shaking motion, blur, noise - so that reinforcement
learning has something to improve. It knows nothing else.

The ByT5 branch of the transformer has a fixed size and is never used by these prompts: its weights are zeros. The
chat template writes a constant prefix of 108 tokens in place of the pipeline's system message.

## How it was made

    {command}

{listing}

## How it scores

Held-out combinations, ODE, no guidance; the judge is `sage_grpo.shapes.judge.ShapesJudge`.

{table}
"""
    replace_text(folder / "README.md", text)


def _half_copy(model: torch.nn.Module) -> torch.nn.Module:
    from copy import deepcopy

    return deepcopy(model).cpu().half().eval()


def _tidy_configs(folder: Path) -> None:
    """Make the folder publishable: no paths of a workplace, and text encoders that load in single precision.

    Diffusers' networks load in single precision unless told otherwise; transformers' follow their configuration.
    """
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            continue
        content.pop("_name_or_path", None)
        if "dtype" in content:
            content["dtype"] = "float32"
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
