"""Files that are written whole or not at all, and the names in safetensors files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sage_grpo import inside
from sage_grpo.models.checkpoints.safety import shards_of
from sage_grpo.models.errors import ModelError

WEIGHTS = "diffusion_pytorch_model"
LEFTOVERS = (".tmp", ".partial", ".lock", ".incomplete", ".metadata")
"""Ends of names that downloads and interrupted writes leave behind."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `target`; after an error nothing of it is left."""
    with inside.replacing(target, suffix=f".{os.getpid()}.tmp") as temporary:
        yield temporary


def copy_file(source: Path, target: Path) -> None:
    """A copy that shares nothing with its source, which may lie in an installed package or in a hub's cache.

    A copy from an earlier save is kept while its size and time are the source's: text encoders are large.
    """
    origin = source.stat()
    if target.is_file() and not target.is_symlink() and not target.samefile(source):
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (origin.st_size, origin.st_mtime_ns):
            return
    with replacing(target) as temporary:
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
