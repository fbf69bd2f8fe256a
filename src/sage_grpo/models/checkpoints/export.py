"""Writing folders and model cards for diffusers."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import has_component, left_out, read_index
from sage_grpo.models.checkpoints.files import WEIGHTS
from sage_grpo.models.lora import FILE, SECOND, Merge
from sage_grpo.utils.safe_io import replace_text, replacing
from sage_grpo.utils.text import percent

TOP_FILES = ("model_index.json", "video.json", "LICENSE", "LICENCE", "NOTICE")
"""Beginnings of the names of files beside the components that a copy takes along."""
SHARD = "10GB"
LEFTOVERS = (".tmp", ".partial", ".lock", ".incomplete", ".metadata")
"""Ends of names that downloads and interrupted writes leave behind."""
ENOUGH = 0.9  # share of a LoRA's update below which merging it deserves a warning


def describe_merge(merge: Merge, dtype: str) -> str:
    text = f"{percent(merge.share)} of the LoRA's update is in the merged {dtype} weights."
    if merge.share < ENOUGH:
        warnings.warn(
            f"{text} {dtype} rounds small updates away: prefer the LoRA itself (export without --merged), or --dtype float32.",
            stacklevel=3,
        )
    return text


def save_folder(source: Path, target: Path, states: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype) -> None:
    """A copy of the checkpoint `source` with the weights of some components replaced. They are stored in `dtype`, but for modules that the
    component's class keeps in float32 (Wan's norms and time embedding)."""
    import diffusers

    if target.resolve() == source.resolve():
        raise ModelError(f'save would overwrite the checkpoint "{source}" that the run was started from.')
    target.mkdir(parents=True, exist_ok=True)
    for file in _copied(source, states):
        copy_file(source / file, target / file)
    for component, state in states.items():
        kept = getattr(diffusers, read_index(source)[component][1])._keep_in_fp32_modules or ()
        folder, tensors = target / component, {}
        for name, tensor in state.items():
            kind = torch.float32 if any(part in kept for part in name.split(".")) else dtype
            tensors[name] = tensor.detach().to("cpu", kind if tensor.is_floating_point() else tensor.dtype).contiguous()
        folder.mkdir(exist_ok=True)
        with staged_weights(tensors, target / f".{component}.tmp") as staging:
            written = {file.name for file in staging.iterdir()}
            for file in folder.iterdir():  # of an earlier save with other shards
                if file.name not in written and file.name.startswith(WEIGHTS):
                    file.unlink()
            for name in written:
                (staging / name).chmod(0o644)  # safetensors writes files that only their owner can read
                os.replace(staging / name, folder / name)


def _copied(source: Path, components: Collection[str]) -> list[Path]:
    """The files, relative to `source`, that stay as they are where these components get other weights: no other files of the folder, such as
    hidden ones."""
    index = read_index(source)
    files = [path for path in source.iterdir() if path.is_file() and path.name.startswith(TOP_FILES)]
    files += [path for name in index if has_component(index, name) for path in (source / name).rglob("*")]
    names = sorted(path.relative_to(source) for path in files if path.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    shown = [name for name in shown if not name.name.endswith(LEFTOVERS)]
    return [name for name in shown if name.parts[0] not in components or name.name == "config.json"]


@contextmanager
def staged_weights(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[Path]:
    """A new folder with the files of a diffusers component of these weights; files that are not moved out of it are deleted at the end."""
    from huggingface_hub import save_torch_state_dict

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        save_torch_state_dict(
            dict(tensors), folder, filename_pattern=f"{WEIGHTS}{{suffix}}.safetensors", max_shard_size=SHARD
        )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_file(source: Path, target: Path) -> None:
    """A copy that shares nothing with its source, which may lie in an installed package or in a hub's cache. A copy from an earlier save is kept
    while its size and time are the source's: text encoders are large."""
    if target.is_file() and not target.is_symlink() and not target.samefile(source):
        origin, copy = source.stat(), target.stat()
        if (copy.st_size, copy.st_mtime_ns) == (origin.st_size, origin.st_mtime_ns):
            return
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        os.utime(temporary, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))


def write_card(folder: Path, model: Any, *, whole: bool) -> None:
    spec, video = model.spec, model.video
    local = spec.path is not None and Path(spec.path).exists()
    # A local path is of no use to a reader of the card, and may be private.
    base = f"path/to/{Path(spec.path).name}" if local else spec.path or "the checkpoint included in sage-grpo"
    tags = ["video-generation" if video.frames > 1 else "image-generation", "reinforcement-learning", "sage-grpo"]
    lines = ["---", "library_name: diffusers", "tags:", *(f"- {tag}" for tag in (tags if whole else [*tags, "lora"]))]
    if spec.path is not None and not local:
        lines.append(f"base_model: {spec.path}")
    lines += ["---", "", f"# {'Weights' if whole else 'LoRA'} trained with sage-grpo", ""]
    lines.append(f"Base: {base}" + (f", revision {spec.revision}" if spec.revision else "") + ".")
    size = f"{video.height} x {video.width}"
    clips = f"clips of {video.frames} frames, {size}, {video.fps:g} fps" if video.frames > 1 else f"images of {size}"
    lines.append(f"Trained on {clips}, guidance {model.guidance_scale:g}, shift {model.shift:g}.")
    if whole and "merged" in model.choices:
        lines.append(model.choices["merged"])
    if not whole and spec.lora is not None:
        alpha = spec.lora.alpha or spec.lora.rank
        lines.append(f"LoRA: rank {spec.lora.rank}, alpha {alpha:g}, on {', '.join(model.lora_targets)}.")
    for adapter in spec.adapters:
        where = Path(adapter.path).name if Path(adapter.path).exists() else adapter.path
        place, end = ("With", ", which is part of these weights") if whole else ("On top of", "")
        lines.append(f"{place} the adapter {where} ({adapter.file}), scale {adapter.scale:g}{end}.")
    lines += ["", "```python", *_usage(model, base, whole=whole), "```", ""]
    replace_text(folder / "README.md", "\n".join(lines))


def _usage(model: Any, base: str, *, whole: bool) -> list[str]:
    pipeline = model.stock_pipeline
    lines = [f"from diffusers import {pipeline}", ""]
    # diffusers needs None for components that the checkpoint leaves out.
    without = "".join(f", {name}=None" for name in left_out(type(model.pipe), model.index))
    if whole:
        return [*lines, f'pipe = {pipeline}.from_pretrained("path/to/this/folder"{without})']
    lines.append(f'pipe = {pipeline}.from_pretrained("{base}"{without})')
    loads = callable(getattr(model.pipe, "load_lora_weights", None))
    for adapter in model.spec.adapters:
        load, unload = ("load_lora_weights", "unload_lora_weights") if loads else ("load_lora_adapter", "unload_lora")
        into = "pipe" if loads else "pipe.transformer"
        second = ", load_into_transformer_2=True" if adapter.expert == "low" else ""
        lines += [
            f'{into}.{load}("path/to/{Path(adapter.path).name}", weight_name="{adapter.file}"{second})',
            f"{into}.fuse_lora(lora_scale={adapter.scale:g})",
            f"{into}.{unload}()",
        ]
    first = 'pipe.load_lora_weights("path/to/this/folder")'
    second = 'pipe.load_lora_weights("path/to/this/folder"{}, load_into_transformer_2=True)'
    if model.experts.components == (SECOND,):
        return [*lines, second.format("")]
    if len(model.experts.components) > 1:
        return [*lines, first, second.format(f', weight_name="{SECOND}/{FILE}"')]
    if "HunyuanVideo15" in pipeline:
        lines.insert(1, "from sage_grpo.models.lora import load_lora")
        note = "# diffusers' HunyuanVideo-1.5 pipelines have no load_lora_weights"
        return [*lines, note, 'load_lora(pipe, "path/to/this/folder")']
    return [*lines, first]
