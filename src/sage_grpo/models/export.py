"""Writing what users of diffusers load: whole folders and model cards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.models.spec import ModelError

if TYPE_CHECKING:
    from sage_grpo.models.family import FamilyModel

SHARD = "10GB"


def save_folder(source: Path, target: Path, component: str, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """A copy of the checkpoint `source` with the weights of one component replaced, stored in `dtype`."""
    from huggingface_hub import save_torch_state_dict

    if target.resolve() == source.resolve():
        raise ModelError(f'save would overwrite the checkpoint "{source}" that the run was started from.')
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        relative = file.relative_to(source)
        replaced = relative.parts[0] == component and relative.name != "config.json"
        if not replaced and relative.parts[0] != "README.md":
            _link(file, target / relative)
    staging = target / f".{component}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in state.items()
    }
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(tensors, staging, filename_pattern=pattern, max_shard_size=SHARD)
    (target / component).mkdir(exist_ok=True)
    written = {file.name for file in staging.iterdir()}
    for file in (target / component).iterdir():  # of an earlier save with other shards
        if file.name not in written and file.name.startswith("diffusion_pytorch_model"):
            file.unlink()
    for name in written:
        (staging / name).chmod(0o644)  # safetensors writes files that only their owner can read
        os.replace(staging / name, target / component / name)
    staging.rmdir()


def _link(source: Path, target: Path) -> None:
    """A hard link where the file system allows it (text encoders are large and never change), else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), temporary)
    except OSError:
        shutil.copy2(source, temporary)
    os.replace(temporary, target)


def write_card(folder: Path, model: FamilyModel, *, whole: bool) -> None:
    """A README.md that says what this is and how to load it."""
    text = card(model, whole=whole)
    temporary = folder / "README.md.tmp"
    temporary.write_text(text)
    os.replace(temporary, folder / "README.md")


def card(model: FamilyModel, *, whole: bool) -> str:
    """The text of a model card."""
    spec, video = model.spec, model.video
    local = spec.path is not None and Path(spec.path).exists()
    # A local path says nothing to a reader of the card, and may say too much.
    base = f"path/to/{Path(spec.path).name}" if local else spec.path or "the checkpoint that sage-grpo carries"
    pipeline = model.index["_class_name"]
    tags = ["video-generation", "reinforcement-learning", "sage-grpo", *([] if whole else ["lora"])]
    header = ["---", "library_name: diffusers", "tags:", *(f"- {tag}" for tag in tags)]
    if spec.path is not None and not local:
        header.append(f"base_model: {spec.path}")
    lines = [*header, "---", "", f"# {'Weights' if whole else 'LoRA'} trained with sage-grpo", ""]
    lines += [f"Base: {base}" + (f", revision {spec.revision}" if spec.revision else "") + "."]
    lines += [f"Trained on clips of {video.frames} frames, {video.height} x {video.width}, {video.fps:g} fps, "]
    lines[-1] += f"guidance {model.guidance_scale:g}, shift {model.shift:g}."
    if not whole and spec.lora is not None:
        targets = spec.lora.targets or list(model.traits.lora_targets)
        alpha = spec.lora.alpha or spec.lora.rank
        lines += [f"LoRA: rank {spec.lora.rank}, alpha {alpha:g}, on {', '.join(targets)}."]
    lines += ["", "```python", *_usage(model, pipeline, base, whole=whole), "```", ""]
    return "\n".join(lines)


def _usage(model: FamilyModel, pipeline: str, base: str, *, whole: bool) -> list[str]:
    start = [f"from diffusers import {pipeline}", ""]
    if whole:
        return [*start, f'pipe = {pipeline}.from_pretrained("path/to/this/folder")']
    lines = [*start, f'pipe = {pipeline}.from_pretrained("{base}")']
    if model.component == "transformer_2":
        return [*lines, 'pipe.load_lora_weights("path/to/this/folder", load_into_transformer_2=True)']
    if "HunyuanVideo15" in pipeline:
        lines.insert(1, "from sage_grpo.models.lora import load_lora")
        return [
            *lines,
            "# diffusers' HunyuanVideo-1.5 pipelines have no load_lora_weights",
            'load_lora(pipe, "path/to/this/folder")',
        ]
    return [*lines, 'pipe.load_lora_weights("path/to/this/folder")']
