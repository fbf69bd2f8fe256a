"""Checkpoints: safetensors shards through torch.distributed.checkpoint, written atomically, with checksums.

A checkpoint is a folder: shard files, `state.json` (everything that is not a tensor) and `manifest.json` (size and checksum of every file). It is
written beside its final place and renamed, so a folder with a manifest is whole; the checksums also catch later damage. Loading reshards: save on any
number of ranks, load on any other. Every rank writes its own shards into a file of its own; nothing is gathered and nothing is pickled. A write that
fails on one rank fails on all, with `SaveFailed`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sage_grpo.distributed.world import World
from sage_grpo.utils.json_schema import DocumentError, demand, read_json, read_object, shown
from sage_grpo.utils.safe_io import regular

FORMAT = 1
MANIFEST = "manifest.json"
WRITTEN = re.compile(r"state\.json|manifest\.json|metrics\.jsonl|shard-[\w-]+\.safetensors")
"""Names of the files that a checkpoint consists of."""
WHOLE, PARTIAL = r"\d{6,}", r"\.\d{6,}\.partial"
"""Names of folders of checkpoints, and of those that are not in their place yet."""
RESTORE = "Restore the checkpoint from a copy, or remove it to continue from the one before it."


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message gives the reason and the remedy."""


class SaveFailed(Exception):
    """A checkpoint could not be written. All ranks raise it; earlier checkpoints are kept."""


def save(
    root: Path,
    number: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
    world: World | None = None,
) -> Path:
    """Write checkpoint `number` under `root`, with the main process's `files` in it; whole or not at all."""
    world, final, partial = world or World(), root / f"{number:06d}", root / f".{number:06d}.partial"
    try:
        with _together(world):
            if world.is_main:
                for leftover in folders(root, PARTIAL):
                    shutil.rmtree(leftover)
                partial.mkdir(parents=True)
        with _together(world), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to save in a single process"
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True, enable_consolidation=False)
            dcp.save(dict(tensors), storage_writer=writer, no_dist=world.control is None, process_group=world.control)
        with _together(world):
            if world.is_main:
                for name, content in (files or {}).items():
                    (partial / name).write_bytes(content)
                _write(partial / "state.json", {"format": FORMAT, "tensors": sorted(tensors), **meta})
                inside = sorted(partial.iterdir())
                _write(partial / MANIFEST, {file.name: _fingerprint(file, sync=True) for file in inside})
                _fingerprint(partial / MANIFEST, sync=True)
                _put_in_place(partial)
    except SaveFailed as failed:
        if world.is_main and find_fault(partial) is not None:  # a whole one may be the only one of its number
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk its bytes are needed
        raise SaveFailed(
            f"Checkpoint {number} could not be written to {root}: {failed}. Checkpoints from before are untouched: fix the "
            "cause, and the same command continues from the newest."
        ) from failed
    except KeyboardInterrupt as stop:  # a second Ctrl-C: the partial folder is no checkpoint, the next run removes it
        raise KeyboardInterrupt(
            "Interrupted while a checkpoint was saved. The same command continues from the newest whole one."
        ) from stop
    return final


def _put_in_place(partial: Path) -> Path:
    """Rename. A checkpoint of the same number is deleted first, and foreign files in it are kept; if a kill interrupts this, `recover` finishes it."""
    final = partial.with_name(partial.name.split(".")[1])
    if final.exists():
        for file in final.iterdir():
            if not WRITTEN.fullmatch(file.name):
                os.replace(file, partial / file.name)
        shutil.rmtree(final)
    os.replace(partial, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return final


def recover(root: Path) -> list[str]:
    """Finish interrupted saves: a whole checkpoint that was not yet renamed gets its name. Only for the process that owns the folder; returns messages."""
    return [
        f"{_put_in_place(partial)} was complete but not yet in its place when the run ended: it is used."
        for partial in folders(root, PARTIAL)
        if find_fault(partial) is None
    ]


def _remove(folder: Path) -> None:
    """Delete a checkpoint, but no foreign files in it. The manifest goes last: a deletion that is interrupted leaves a folder known to be damaged."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):
        if WRITTEN.fullmatch(file.name) and not file.is_dir():
            file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def folders(root: Path, pattern: str = WHOLE) -> list[Path]:
    """The checkpoints of a run, damaged ones too, oldest first."""
    if not root.is_dir():
        return []
    matching = [f for f in root.iterdir() if re.fullmatch(pattern, f.name) and f.is_dir() and not f.is_symlink()]
    return sorted(matching, key=lambda folder: (int(re.sub(r"\D", "", folder.name)), folder.name))


@contextmanager
def _together(world: World) -> Iterator[None]:
    """Raise an error of one process on all, so that none waits for one that has failed."""
    error: BaseException | None = None
    rank = world.number
    try:
        yield
    except dcp.CheckpointException as failed:  # not a subclass of Exception: it would pass every handler above
        rank, (error, _) = next(iter(failed.failures.items()))
    except (OSError, ValueError, KeyboardInterrupt) as failed:
        error = failed
    where = "" if world.control is None else f"rank {rank}: "
    text = "" if error is None else f"{where}{type(error).__name__}: {error}"[:500]
    faults = [fault for fault in world.texts(text) if fault]
    if isinstance(error, KeyboardInterrupt):
        raise error
    if faults:
        raise SaveFailed(faults[0]) from error


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
    world = world or World()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            reader = HuggingFaceStorageReader(str(folder))
            dcp.load(dict(tensors), storage_reader=reader, no_dist=world.control is None, process_group=world.control)
    except dcp.CheckpointException as error:  # not a subclass of Exception: it would pass every handler above
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"{folder} does not fit this configuration: {cause}. Use the model and LoRA settings of the run that wrote it; to "
            "train with others, choose another `out`."
        ) from error


def read_meta(folder: Path, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything in a checkpoint that is not a tensor; `kinds` are the keys that the caller needs, with their types.

    The folder may be untrusted, so its content is checked.
    """
    file = folder / "state.json"
    try:
        meta = read_object(file)
        if meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {shown(meta.get('format'))}; this version reads {FORMAT}."
            )
        demand(meta, {"tensors": list[str], **(kinds or {})}, str(file))
    except DocumentError as error:
        raise CheckpointError(f"{error} {RESTORE}") from error
    return meta


@contextmanager
def continuing(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / 'state.json'} holds what no run writes ({type(error).__name__}: {error}). {RESTORE}"
        ) from error


def newest_good(root: Path) -> Path | None:
    """The newest checkpoint whose every file has the size and checksum of its manifest; warns about those passed over."""
    for folder in reversed(folders(root)):
        fault = find_fault(folder)
        if fault is None:
            return folder
        warnings.warn(f"Checkpoint {folder} is damaged ({fault}): using the one before it.", stacklevel=2)
    return None


def find_fault(folder: Path) -> str | None:
    try:
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or "state.json" not in manifest:
            return f"{MANIFEST} does not list the files of a checkpoint"
        if strange := [name for name in manifest if Path(name).name != name]:
            return f"its manifest names {strange[0]!r}, which is not a file of its own"
        if not any(name.endswith(".safetensors") for name in manifest):
            return f"{MANIFEST} lists no tensors"
        for name, wanted in manifest.items():
            if _fingerprint(folder / name) != wanted:
                return f"{name} was changed or cut short"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def prune(root: Path, keep: int, newest: int, spare: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints up to number `newest`, the last one saved; number `spare` is kept too.

    Later numbers can only be damaged ones that the run was not continued from: they must not push out good ones.
    """
    known = [folder for folder in folders(root) if int(folder.name) <= newest and int(folder.name) != spare]
    for folder in known[:-keep]:
        _remove(folder)


def _fingerprint(file: Path, *, sync: bool = False) -> dict[str, Any]:
    with regular(file).open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
        if sync:
            os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1))
