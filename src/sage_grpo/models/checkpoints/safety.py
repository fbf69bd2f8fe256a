"""What a checkpoint folder may say: it names classes of diffusers and transformers and files of its own, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from sage_grpo import documents
from sage_grpo.documents import DocumentError
from sage_grpo.models.spec import ModelError

LIBRARIES = ("diffusers", "transformers")
"""Where components may come from; importing any other module would run code that the folder chose."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where it is none."""
    try:
        return documents.read_object(file)
    except DocumentError as error:
        raise ModelError(f"{error} Download the checkpoint again.") from error


def read_if_there(file: Path) -> dict[str, Any]:
    """The same; empty where there is no such file."""
    return read_json(file) if file.is_file() else {}


def check_index(file: Path, index: Mapping[str, Any]) -> None:
    """Refuse a model_index.json that names code outside the two libraries."""
    if not isinstance(index.get("_class_name"), str):
        raise ModelError(
            f"{file}: _class_name must name a pipeline of diffusers, got {str(index.get('_class_name'))[:200]}."
        )
    for name, entry in index.items():
        if not isinstance(entry, list) or entry == [None, None]:
            continue
        library, kind = entry if len(entry) == 2 else (None, None)
        # transformers' Auto classes look into the folder for code of its own.
        automatic = library == "transformers" and str(kind).startswith("Auto")
        if library not in LIBRARIES or not isinstance(kind, str) or not kind.isidentifier() or automatic:
            raise ModelError(
                f"{file} says that {name!r} is {str(entry)[:200]}. Only classes of {' and '.join(LIBRARIES)} are loaded (by their own "
                "names, not Auto...), never code that a checkpoint names."
            )


def check_shards(folder: Path) -> None:
    """Refuse index files of sharded weights that point outside their own folder."""
    for file in sorted([*folder.glob("*.index.json"), *folder.glob("*/*.index.json")]):
        shards_of(file)


def shards_of(index: Path) -> list[str]:
    """The files that an index of sharded weights names, each once."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index} has no weight_map. Download the checkpoint again.")
    for shard in shards.values():
        plain = isinstance(shard, str) and PurePosixPath(shard).name == shard == PureWindowsPath(shard).name
        if not plain or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{index} names the shard {str(shard)[:200]!r}: it must be a .safetensors file beside the index itself."
            )
    return sorted(set(shards.values()))
