"""A finished pipeline as a folder that can be published, and its card."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from research.pretraining.options import Flaws, StageOptions
from sage_grpo.worlds.world import PromptWorld

SHARD = "10MB"
"""Largest weight file; larger networks are split, which the loaders understand."""


def save_pipeline(pipe: Any, folder: Path, world: PromptWorld, shift: float) -> None:
    """Write a pipeline with the format of its clips beside it; an earlier folder of that name is replaced."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipe.save_pretrained(temporary, max_shard_size=SHARD)
    _tidy_configs(temporary)
    frames, side, fps = world.format
    video = {"frames": frames, "height": side, "width": side, "fps": fps, "shift": shift}
    (temporary / "video.json").write_text(json.dumps(video) + "\n")
    for path in temporary.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def _tidy_configs(folder: Path) -> None:
    """Make the folder publishable: no paths of a workplace, names that older versions know, and text encoders that load in single precision.

    Diffusers' networks load in single precision unless told otherwise; transformers' follow their configuration.
    """
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
        if not isinstance(content, dict):
            continue
        content.pop("_name_or_path", None)
        if "dtype" in content:
            content["dtype"] = "float32"
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def listing(world: PromptWorld, options: StageOptions, sizes: object, quality: float) -> str:
    """What a card says of how a model was made, as a list in Markdown."""
    frames, side, fps = world.format
    facts = {
        "format": f"{frames} frames of {side}x{side} at {fps:g} frames a second",
        "VAE reconstruction of clean held-out clips": f"{quality:.2f} dB PSNR",
        "training data": Flaws(**{field.name: getattr(options, field.name) for field in fields(Flaws)}),
        "sizes": sizes,
        "seed": options.seed,
        "scored on": f"{options.score_prompts} held-out prompts, {options.score_steps} ODE steps, shift {options.shift}",
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def command(world: PromptWorld, options: StageOptions) -> str:
    """The command that reproduces a run: every option that is not at its default and says more than where, when and how it is told.

    What the run went on from has no name that others know: EARLIER stands for its folder.
    """
    left_out = {"out", "device", "report_seconds"}
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = [
        f"--pretrain.{field.name} {'EARLIER' if isinstance(values[field.name], Path) else values[field.name]}"
        for field in fields(options)
        if values[field.name] != field.default and field.name not in left_out
    ]
    return " ".join([f"python -m research.pretraining.{world.name} pretrain --pretrain.out DIR", *changed])
