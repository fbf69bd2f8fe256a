"""Encoded prompts (and clips) on disk, so that encoders run once and can then be unloaded."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.safe_io import replacing

FORMAT = "3"  # raise this when the meaning of stored tensors changes: older files are then not found


def cleaner() -> str:
    """The version of ftfy, with which Wan's pipelines clean prompts: another version, or none, can give other tokens."""
    try:
        return f"ftfy {version('ftfy')}"
    except PackageNotFoundError:
        return "no ftfy"


class Encoded(dict[str, Tensor]):
    """The tensors of one encoding; unlike a plain dict it can be referred to weakly."""


class EncodingCache:
    """Maps the inputs of an encoding to its tensors: in memory while they are referenced, on disk as a file with a checksum. A damaged file is
    encoded again; a disk that is full or cannot be written costs one warning. `what` names the content in warnings."""

    def __init__(self, folder: Path | None, fingerprint: str, what: str = "Encoded prompts") -> None:
        self.folder, self.what = folder, what
        self.fingerprint = digest(cleaner(), fingerprint)
        self._writable = folder is not None
        self._memory: WeakValueDictionary[str, Encoded] = WeakValueDictionary()

    def get(self, parts: tuple[str, ...], encode: Callable[[], Mapping[str, Tensor]]) -> Encoded:
        """The tensors for `parts`; `encode` runs only where neither memory nor disk has them."""
        key = digest(FORMAT, self.fingerprint, *parts)
        encoded = self._memory.get(key)
        if encoded is None:
            encoded = self._read(key)
        if encoded is None:
            encoded = Encoded({name: tensor.detach().cpu().contiguous() for name, tensor in encode().items()})
            self._write(key, encoded)
        self._memory[key] = encoded
        return encoded

    def _read(self, key: str) -> Encoded | None:
        if self.folder is None:
            return None
        file = self.folder / key[:2] / f"{key}.safetensors"
        try:
            body = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            warnings.warn(f"{self.what} cannot be read ({error}): going on without {self.folder}.", stacklevel=2)
            self.folder = None
            return None
        try:
            tensors = Encoded(load(body))
            if _stored_checksum(body) == _checksum(key, tensors):
                return tensors
            fault = "its checksum does not fit"
        except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
        warnings.warn(f"{self.what.removesuffix('s')} {file} is damaged ({fault}): encoding it again.", stacklevel=2)
        return None

    def _write(self, key: str, tensors: Encoded) -> None:
        if self.folder is None or not self._writable:
            return
        file = self.folder / key[:2] / f"{key}.safetensors"
        try:  # several runs may encode one prompt at the same time, also on several machines with one file system
            with replacing(file, suffix=f".{os.getpid()}.{uuid.uuid4().hex}.tmp") as temporary:
                temporary.write_bytes(save(tensors, metadata={"checksum": _checksum(key, tensors)}))
        except OSError as error:  # full, read-only, not ours, no folder
            self._writable = False
            warnings.warn(
                f"{self.what} cannot be kept in {self.folder} ({error}): going on without. Make room, or set model.cache to another folder.",
                stacklevel=2,
            )


def _checksum(key: str, tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _stored_checksum(body: bytes) -> str | None:
    (length,) = struct.unpack("<Q", body[:8])
    return parse_json(body[8 : 8 + length]).get("__metadata__", {}).get("checksum")


def digest(*parts: str) -> str:
    """A hash of a sequence of strings in which no two sequences run together."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-grpo" / "conditioning"


def image_digest(image: Tensor | None) -> str:
    if image is None:
        return ""
    return hashlib.sha256(repr(tuple(image.shape)).encode() + image.cpu().contiguous().numpy().tobytes()).hexdigest()
