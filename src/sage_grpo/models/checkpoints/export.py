"""Writing folders and model cards for diffusers."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import has_component, left_out, read_index, resolve
from sage_grpo.models.checkpoints.files import WEIGHTS, stored_shapes
from sage_grpo.models.devices import DTYPES
from sage_grpo.models.experts import trained_components
from sage_grpo.models.lora import FILE, SECOND, Merge
from sage_grpo.models.spec import ModelSpec
from sage_grpo.utils.hub import free_space, in_words
from sage_grpo.utils.safe_io import replace_text, replacing
from sage_grpo.utils.text import percent

TOP_FILES = ("model_index.json", "video.json", "LICENSE", "LICENCE", "NOTICE")
"""Beginnings of the names of files beside the components that a copy takes along."""
SHARD = "10GB"
LOAD = 'pipe.load_lora_weights("path/to/this/folder")'
LEFTOVERS = (".tmp", ".partial", ".lock", ".incomplete", ".metadata")
"""Ends of names that downloads and interrupted writes leave behind."""
ENOUGH = 0.9
"""Share of a LoRA's update below which merging it deserves a warning."""


def check_space(spec: ModelSpec, target: Path) -> str:
    """The bytes that a spec's whole model will take at `target`, as a sentence; ModelError where the disk has fewer. No weights are read."""
    source = resolve(spec)
    components = trained_components(spec, read_index(source))
    size = sum(
        (source / file).stat().st_size for file in _copied(source, components) if _differs(source / file, target / file)
    )
    for component in components:
        kept = _kept_in_float32(source, component)
        for name, shape in stored_shapes(source / component).items():
            size += math.prod(shape) * _stored_dtype(name, DTYPES[spec.dtype], kept).itemsize
    disk, free = free_space(target)
    need = f"{target} needs {in_words(size)} for the whole model, and {disk} has {in_words(free)} free."
    if free < size:
        alone = " The LoRA alone (without --merged) is small." if spec.lora else ""
        raise ModelError(f"{need} Make room, or give another --out.{alone}")
    return need


def describe_merge(merge: Merge, dtype: str) -> str:
    """The share of a LoRA's update that merged weights hold, as a sentence; warns where much of it was rounded away."""
    text = (
        f"{percent(merge.share)} of the LoRA's update is in the merged {dtype} weights, which differ from base + LoRA by "
        f"{percent(merge.distance)} of it."
    )
    if merge.share < ENOUGH:
        warnings.warn(
            f"{text} {dtype} rounds small updates away: prefer the LoRA itself (export without --merged), or --dtype float32.",
            stacklevel=3,
        )
    return text


def save_folder(source: Path, target: Path, states: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype) -> None:
    """A copy of the checkpoint `source` with the weights of some components replaced.

    They are stored in `dtype`, but for modules that the component's class keeps in float32 (Wan's norms and time embedding).
    """
    if target.resolve() == source.resolve():
        raise ModelError(f'save would overwrite the checkpoint "{source}" that the run was started from.')
    target.mkdir(parents=True, exist_ok=True)
    for file in _copied(source, states):
        copy_file(source / file, target / file)
    for component, state in states.items():
        _replace_weights(target, component, state, dtype, _kept_in_float32(source, component))


def _copied(source: Path, components: Collection[str]) -> list[Path]:
    """The files, relative to `source`, that stay as they are where these components get other weights."""
    files = [file.relative_to(source) for file in _parts(source)]
    return [file for file in files if file.parts[0] not in components or file.name == "config.json"]


def _kept_in_float32(source: Path, component: str) -> Sequence[str]:
    """Modules that a component's class keeps in float32."""
    import diffusers

    return getattr(diffusers, read_index(source)[component][1])._keep_in_fp32_modules or ()


def _stored_dtype(name: str, dtype: torch.dtype, kept: Sequence[str]) -> torch.dtype:
    return torch.float32 if any(part in kept for part in name.split(".")) else dtype


def _replace_weights(
    target: Path, component: str, state: Mapping[str, Tensor], dtype: torch.dtype, kept: Sequence[str]
) -> None:
    def stored(name: str, tensor: Tensor) -> Tensor:
        kind = _stored_dtype(name, dtype, kept)
        return tensor.detach().to("cpu", kind if tensor.is_floating_point() else tensor.dtype).contiguous()

    folder = target / component
    folder.mkdir(exist_ok=True)
    tensors = {name: stored(name, tensor) for name, tensor in state.items()}
    with staged_weights(tensors, target / f".{component}.tmp") as staging:
        written = {file.name for file in staging.iterdir()}
        for file in folder.iterdir():  # of an earlier save with other shards
            if file.name not in written and file.name.startswith(WEIGHTS):
                file.unlink()
        for name in written:
            (staging / name).chmod(0o644)  # safetensors writes files that only their owner can read
            os.replace(staging / name, folder / name)


def _parts(source: Path) -> list[Path]:
    """The files that belong to a checkpoint: its index, its components, its licence; no other files in the folder."""
    index = read_index(source)
    components = [name for name in index if has_component(index, name)]
    files = [path for path in source.iterdir() if path.is_file() and path.name.startswith(TOP_FILES)]
    files += [path for name in components for path in (source / name).rglob("*") if path.is_file()]
    shown = [path for path in files if not any(part.startswith(".") for part in path.relative_to(source).parts)]
    return sorted(path for path in shown if not path.name.endswith(LEFTOVERS))


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
    """A copy that shares nothing with its source, which may lie in an installed package or in a hub's cache.

    A copy from an earlier save is kept while its size and time are the source's: text encoders are large.
    """
    if not _differs(source, target):
        return
    origin = source.stat()
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        os.utime(temporary, ns=(origin.st_atime_ns, origin.st_mtime_ns))


def _differs(source: Path, target: Path) -> bool:
    """True unless `target` is a copy of the file from an earlier save."""
    if not target.is_file() or target.is_symlink() or target.samefile(source):
        return True
    origin, there = source.stat(), target.stat()
    return (there.st_size, there.st_mtime_ns) != (origin.st_size, origin.st_mtime_ns)


def write_card(folder: Path, model: Any, *, whole: bool) -> None:
    """Write a README.md on a FamilyModel's files, a whole checkpoint or a LoRA, and how to load them."""
    spec, video = model.spec, model.video
    base, local = spec.path or "the checkpoint that sage-grpo carries", False
    if spec.path is not None and Path(spec.path).exists():
        # A local path is of no use to a reader of the card, and may be private.
        base, local = f"path/to/{Path(spec.path).name}", True
    tags = [
        "video-generation" if video.frames > 1 else "image-generation",
        "reinforcement-learning",
        "sage-grpo",
        *([] if whole else ["lora"]),
    ]
    header = ["---", "library_name: diffusers", "tags:", *(f"- {tag}" for tag in tags)]
    if spec.path is not None and not local:
        header.append(f"base_model: {spec.path}")
    lines = [*header, "---", "", f"# {'Weights' if whole else 'LoRA'} trained with sage-grpo", ""]
    lines += [f"Base: {base}" + (f", revision {spec.revision}" if spec.revision else "") + "."]
    size = f"{video.height} x {video.width}"
    clips = f"clips of {video.frames} frames, {size}, {video.fps:g} fps" if video.frames > 1 else f"images of {size}"
    start = "" if model.strength is None else f", from clips with strength {model.strength:g}"
    lines += [f"Trained on {clips}, guidance {model.guidance_scale:g}, shift {model.shift:g}{start}."]
    if whole and "merged" in model.choices:
        lines += [model.choices["merged"]]
    if not whole and spec.lora is not None:
        alpha = spec.lora.alpha or spec.lora.rank
        lines += [f"LoRA: rank {spec.lora.rank}, alpha {alpha:g}, on {', '.join(model.lora_targets)}."]
    for adapter in spec.adapters:
        where = Path(adapter.path).name if Path(adapter.path).exists() else adapter.path
        lines += [
            f"{'With' if whole else 'On top of'} the adapter {where} ({adapter.file}), scale {adapter.scale:g}{', which is part of these weights' if whole else ''}."
        ]
    lines += ["", "```python", *_usage(model, base, whole=whole), "```", ""]
    replace_text(folder / "README.md", "\n".join(lines))


def _usage(model: Any, base: str, *, whole: bool) -> list[str]:
    pipeline = model.stock_pipeline
    start = [f"from diffusers import {pipeline}", ""]
    # diffusers needs None for components that the checkpoint leaves out.
    without = "".join(f", {name}=None" for name in left_out(type(model.pipe), model.index))
    if whole:
        return [*start, f'pipe = {pipeline}.from_pretrained("path/to/this/folder"{without})']
    lines = [*start, f'pipe = {pipeline}.from_pretrained("{base}"{without})']
    for adapter in model.spec.adapters:
        into = "pipe" if callable(getattr(model.pipe, "load_lora_weights", None)) else "pipe.transformer"
        load = "load_lora_weights" if into == "pipe" else "load_lora_adapter"
        second = ", load_into_transformer_2=True" if adapter.expert == "low" else ""
        lines += [f'{into}.{load}("path/to/{Path(adapter.path).name}", weight_name="{adapter.file}"{second})']
        lines += [
            f"{into}.fuse_lora(lora_scale={adapter.scale:g})",
            f"{into}.{'unload_lora_weights' if into == 'pipe' else 'unload_lora'}()",
        ]
    second = 'pipe.load_lora_weights("path/to/this/folder"{}, load_into_transformer_2=True)'
    if model.experts.components == ("transformer_2",):
        return [*lines, second.format("")]
    if len(model.experts.components) > 1:
        return [*lines, LOAD, second.format(f', weight_name="{SECOND}/{FILE}"')]
    if "HunyuanVideo15" in pipeline:
        lines.insert(1, "from sage_grpo.models.lora import load_lora")
        return [
            *lines,
            "# diffusers' HunyuanVideo-1.5 pipelines have no load_lora_weights",
            'load_lora(pipe, "path/to/this/folder")',
        ]
    return [*lines, LOAD]
