"""Checks of a checkpoint's files: they name only classes of diffusers and transformers and files of their own, and their weights are complete.

The libraries notice half a download only when they read it, for a text encoder long after a run began, and name neither file nor remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.utils import json_schema
from sage_grpo.utils.json_schema import DocumentError
from sage_grpo.utils.pretrained import ADAPTER_CONFIG
from sage_grpo.utils.safe_io import replacing

LIBRARIES = {"diffusers": "diffusers", "transformers": "transformers", "ltx2": "diffusers.pipelines.ltx2"}
"""Allowed libraries of components by their name in a folder, with the module; importing any other would run code that the folder chose. (diffusers
calls components that only one pipeline has by that pipeline's name.)"""
WEIGHTS = "diffusion_pytorch_model"
STEMS = (WEIGHTS, "model")  # names under which diffusers and transformers look for weights


def read_json(file: Path) -> dict[str, Any]:
    try:
        return json_schema.read_object(file)
    except DocumentError as error:
        raise ModelError(f"{error} Download the checkpoint again.") from error


def read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def check_index(file: Path, index: Mapping[str, Any]) -> None:
    """Refuse a model_index.json that names code outside the two libraries, or a component with an adapter, which would change its weights."""
    if not isinstance(index.get("_class_name"), str):
        raise ModelError(
            f"{file}: _class_name must name a diffusers pipeline, got {str(index.get('_class_name'))[:200]}."
        )
    for name, entry in index.items():
        if not isinstance(entry, list) or entry == [None, None]:
            continue
        if not name.isidentifier():  # it is also the name of a folder
            raise ModelError(f"{file} has a component {name[:200]!r}: names of components are words, such as vae.")
        if (file.parent / name / ADAPTER_CONFIG).exists():
            raise ModelError(
                f"{file.parent / name} holds {ADAPTER_CONFIG}, an adapter that transformers would add to the weights. Remove that file, or "
                "save the component with its adapter merged."
            )
        library, kind = entry if len(entry) == 2 else (None, None)
        # transformers' Auto classes look into the folder for code of its own.
        automatic = library == "transformers" and str(kind).startswith("Auto")
        if library not in LIBRARIES or not isinstance(kind, str) or not kind.isidentifier() or automatic:
            raise ModelError(
                f"{file} says that {name!r} is {str(entry)[:200]}. Only classes of diffusers and transformers are loaded (by their own "
                "names, not Auto...), never code that a checkpoint names."
            )


def check_shards(folder: Path) -> None:
    for file in sorted([*folder.glob("*.index.json"), *folder.glob("*/*.index.json")]):
        shards_of(file)


def shards_of(index: Path) -> list[str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index} has no weight_map. Download the checkpoint again.")
    for shard in shards.values():
        plain = isinstance(shard, str) and PurePosixPath(shard).name == shard == PureWindowsPath(shard).name
        if not plain or not shard.endswith(".safetensors"):
            raise ModelError(f"{index} names the shard {str(shard)[:200]!r}: it must be a .safetensors file beside it.")
    return sorted(set(shards.values()))


def check_lengths(folder: Path) -> None:
    """Refuse a checkpoint one of whose weight files is missing, was cut short or is not a safetensors file, by their headers."""
    check_shards(folder)
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        for file in (file for stem in STEMS for file in weight_files(component, stem)):
            with opened_weights(file):
                pass


def weight_files(component: Path, stem: str) -> list[Path]:
    index, single = component / f"{stem}.safetensors.index.json", component / f"{stem}.safetensors"
    if index.is_file():
        return [component / name for name in shards_of(index)]
    return [single] if single.is_file() else []


@contextmanager
def opened_weights(file: Path) -> Iterator[Any]:
    """A safetensors file whose header fits its length, with tensors as torch's; ModelError otherwise."""
    if not file.is_file():
        present = ", ".join(sorted(other.name for other in file.parent.iterdir())) or "nothing"
        raise ModelError(f"{file} is missing (found: {present}). Download the checkpoint again in full.")
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} was cut short or is not a safetensors file: {error} ({file.stat().st_size:,} bytes). Download it again (of a checkpoint "
            f"of the hub `hf download NAME --include '{file.parent.name}/*'` fetches this folder), or copy it again from where it is whole."
        ) from error


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file for everybody; by itself safetensors writes files that only their owner can read."""
    with replacing(file) as temporary:
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        temporary.chmod(0o644)


def stored_shapes(folder: Path, stem: str = WEIGHTS) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder, stem) or [folder / f"{stem}.safetensors"]:
        shapes |= read_header(file).shapes
    return shapes


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: shapes and dtypes (in its own names) of the tensors by name, and its metadata."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    with opened_weights(file) as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
        return Header(shapes, {name: one.get_dtype() for name, one in slices.items()}, dict(content.metadata() or {}))
