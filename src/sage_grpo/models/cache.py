"""Encoded prompts, in memory and on disk, so that text encoders run once and can then be unloaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = "1"
"""Raise this when the meaning of what is stored changes: older files are then not found."""


def cleaner() -> str:
    """What Wan's pipelines clean prompts with: another version, or none, can give other tokens."""
    try:
        return f"ftfy {version('ftfy')}"
    except PackageNotFoundError:
        return "no ftfy"


class EncodingCache:
    """Maps what an encoding depends on to its tensors."""

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = digest(cleaner(), fingerprint)
        self._memory: dict[str, dict[str, Tensor]] = {}

    def get(self, parts: tuple[str, ...], encode: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors for `parts`; `encode` runs only where neither memory nor disk has them."""
        key = digest(FORMAT, self.fingerprint, *parts)
        if key not in self._memory:
            tensors = self._read(key)
            if tensors is None:
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encode().items()}
                self._write(key, tensors)
            self._memory[key] = tensors
        return self._memory[key]

    def _file(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, key: str) -> dict[str, Tensor] | None:
        file = self._file(key)
        if file is None or not file.is_file():
            return None
        try:
            return load_file(file)
        except SafetensorError:  # cut short by a full disk, say: encode again and replace it
            return None

    def _write(self, key: str, tensors: dict[str, Tensor]) -> None:
        file = self._file(key)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, temporary)
        os.replace(temporary, file)


def digest(*parts: str) -> str:
    """A hash of a sequence of strings in which no two sequences run together."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


def default_folder() -> Path:
    """Where encoded prompts live unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-grpo" / "conditioning"


def image_digest(image: Tensor | None) -> str:
    """A hash of a picture's shape and bytes; empty for none."""
    if image is None:
        return ""
    return hashlib.sha256(repr(tuple(image.shape)).encode() + image.cpu().contiguous().numpy().tobytes()).hexdigest()
