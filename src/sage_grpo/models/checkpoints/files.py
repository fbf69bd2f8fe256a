"""Files that are written whole or not at all, and the names in safetensors files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sage_grpo import inside
from sage_grpo.models.checkpoints.safety import shards_of
from sage_grpo.models.spec import ModelError

WEIGHTS = "diffusion_pytorch_model"
SHARD = "10GB"
LEFTOVERS = (".tmp", ".partial", ".lock", ".incomplete", ".metadata")
"""Ends of names that downloads and interrupted writes leave behind."""


@contextmanager
def staged_weights(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[Path]:
    """A new folder with the files of a diffusers component of these weights; what is not taken out of it is gone at the end."""
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
    origin = source.stat()
    if target.is_file() and not target.is_symlink() and not target.samefile(source):
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (origin.st_size, origin.st_mtime_ns):
            return
    with inside.replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        os.utime(temporary, ns=(origin.st_atime_ns, origin.st_mtime_ns))


def is_leftover(path: Path) -> bool:
    """Whether a relative path is hidden or was left behind by a download or an interrupted write."""
    return any(part.startswith(".") for part in path.parts) or path.name.endswith(LEFTOVERS)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a diffusers component's tensors, from the headers of the files that diffusers reads."""
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    names = [f"{WEIGHTS}.safetensors"]
    if index.is_file():
        names = shards_of(index)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if not (folder / name).is_file():
            found = ", ".join(sorted(file.name for file in folder.iterdir()))
            raise ModelError(f'"{folder}" has no {name} (found: {found}). Download the checkpoint again in full.')
        try:
            with safe_open(folder / name, framework="pt") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(
                f"{folder / name} cannot be read ({error}): it was cut short or is another kind of file. Download it again."
            ) from error
    return shapes
