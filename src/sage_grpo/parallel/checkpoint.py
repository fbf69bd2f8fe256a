"""Checkpoints: safetensors shards through torch.distributed.checkpoint, written atomically, with checksums.

A checkpoint is a folder: shard files, `state.json` (everything that is not a tensor) and `manifest.json` (size and
checksum of every file). It is written beside its final place and renamed, so a folder with a manifest is whole; the
checksums also catch what happens later to a disk. Loading reshards: save on any number of ranks, load on any other.
Every rank writes its own shards into a file of its own; nothing is gathered and nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sage_grpo.parallel.world import World

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


class Writer:
    """Writes checkpoints at once, or in the background from a copy of this process's shards in CPU memory."""

    def __init__(self, world: World, *, background: bool = False) -> None:
        self.world, self.background = world, background
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, root: Path, number: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write checkpoint `number` under `root`; in the background it may not be there yet when this returns."""
        self.finish()
        if not self.background:
            return save(root, number, tensors, meta, self.world)
        # Copies, because training goes on: also the rest of the state changes under our hands.
        staged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        frozen = json.loads(json.dumps(meta))
        self._thread = threading.Thread(target=self._write, args=(root, number, staged, frozen), name="checkpoint")
        self._thread.start()
        return _folder(root, number)

    def _write(self, root: Path, number: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        try:
            save(root, number, tensors, meta, self.world)
        except (OSError, RuntimeError, ValueError) as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the write that is under way; raises what went wrong with it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"A checkpoint could not be written in the background: {error}") from error


def save(root: Path, number: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], world: World) -> Path:
    """Write checkpoint `number` under `root`; whole or not at all."""
    final, partial = _folder(root, number), root / f".{number:06d}.partial"
    if world.is_main:
        for leftover in root.glob(".*.partial"):  # of writes that were interrupted
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to save in a single process"
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True, enable_consolidation=False)
        dcp.save(dict(tensors), storage_writer=writer, no_dist=world.files is None, process_group=world.files)
    _wait(world)
    if world.is_main:
        _write(partial / "state.json", {"format": FORMAT, "tensors": sorted(tensors), **meta})
        _write(
            partial / "manifest.json", {file.name: _fingerprint(file, sync=True) for file in sorted(partial.iterdir())}
        )
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _sync_folder(root)
    _wait(world)
    return final


def _folder(root: Path, number: int) -> Path:
    return root / f"{number:06d}"


def _wait(world: World) -> None:
    """A barrier of its own group: a write in the background must not meet the training's."""
    if world.files is not None:
        dist.monitored_barrier(world.files, timedelta(seconds=world.timeout), wait_all_ranks=True)


def load(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill `tensors` (which have the right shapes and shards) in place."""
    saved, asked = set(read_meta(folder)["tensors"]), set(tensors)
    if saved != asked:
        missing, extra = sorted(asked - saved)[:3], sorted(saved - asked)[:3]
        raise CheckpointError(
            f"{folder} does not fit this configuration: it lacks {missing or 'nothing'} and has {extra or 'nothing'} besides. "
            "Resume with the model, LoRA, EMA and trust-region settings of the run that wrote it, or choose another `out`."
        )
    load_some(folder, tensors, world)


def load_some(folder: Path, tensors: Mapping[str, Tensor], world: World | None = None) -> None:
    """Fill `tensors`, which may be only some of the checkpoint's."""
    world = world or World()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                no_dist=world.files is None,
                process_group=world.files,
            )
    except dcp.CheckpointException as error:  # no subclass of Exception: it would pass every handler above
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"{folder} does not fit this configuration: {cause}. Use the model and LoRA settings of the run that wrote it; to "
            "train with others, choose another `out`."
        ) from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint that is not a tensor."""
    meta = json.loads((folder / "state.json").read_text())
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {meta.get('format')}; this version reads {FORMAT}.")
    return meta


def newest_good(root: Path) -> Path | None:
    """The newest checkpoint whose every file has the size and checksum of its manifest; warns about those passed over."""
    for folder in sorted((f for f in root.glob("[0-9]*") if f.is_dir()), reverse=True):
        fault = find_fault(folder)
        if fault is None:
            return folder
        warnings.warn(f"Checkpoint {folder} is damaged ({fault}): using the one before it.", stacklevel=2)
    return None


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, wanted in manifest.items():
            if Path(name).name != name:
                return f"its manifest names {name!r}, which is no file of its own"
            if _fingerprint(folder / name) != wanted:
                return f"{name} was changed or cut short"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for folder in sorted(f for f in root.glob("[0-9]*") if f.is_dir())[:-keep]:
        shutil.rmtree(folder)


def _fingerprint(file: Path, *, sync: bool = False) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
        if sync:
            os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with file.open("w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
