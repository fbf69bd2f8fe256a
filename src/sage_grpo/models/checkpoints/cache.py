"""Encoded prompts and pictures (and clips) in memory and on disk, so that encoders run once and can then be unloaded."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_grpo.models import ModelError, no_numbers
from sage_grpo.models.checkpoints.checkpoint import fingerprint, has_component
from sage_grpo.models.network.inputs import check_image
from sage_grpo.types import Conditioning
from sage_grpo.utils.safe_io import replacing

FORMAT = "3"  # raise this when the meaning of stored tensors changes: older files are then not found


class Encoded(dict[str, Tensor]):
    """The tensors of one encoding; unlike a plain dict it can be referred to weakly."""


class EncodingCache:
    """Maps the inputs of an encoding to its tensors: in memory while they are referenced, on disk as a file each. A damaged file is
    encoded again; a disk that is full or cannot be written costs one warning. `what` names the content in warnings."""

    def __init__(self, folder: Path | None, fingerprint: str, what: str = "Encoded prompts") -> None:
        self.folder, self.what = folder, what
        # Wan's pipelines clean prompts with ftfy: another version can give other tokens.
        self.fingerprint = digest(f"ftfy {version('ftfy')}", fingerprint)
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
            warnings.warn(f"{self.what} cannot be read ({error}): continuing without {self.folder}.", stacklevel=2)
            self.folder = None
            return None
        try:
            return Encoded(load(body))
        except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{self.what.removesuffix('s')} {file} is damaged ({fault}): encoding it again.", stacklevel=2
            )
            return None

    def _write(self, key: str, tensors: Encoded) -> None:
        if self.folder is None or not self._writable:
            return
        file = self.folder / key[:2] / f"{key}.safetensors"
        try:  # several runs may encode one prompt at the same time, also on several machines with one file system
            with replacing(file, suffix=f".{os.getpid()}.{uuid.uuid4().hex}.tmp") as temporary:
                temporary.write_bytes(save(tensors))
        except OSError as error:  # full, read-only, not ours, no folder
            self._writable = False
            warnings.warn(
                f"{self.what} cannot be kept in {self.folder} ({error}): continuing without. Make room, or set model.cache to another folder.",
                stacklevel=2,
            )


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


def condition(model: Any, prompt: str, image: Tensor | None) -> Conditioning:
    check_image(image, model.pictures)
    key, negative = image_digest(image), None
    guided = model.guidance_scale != 1 or (model.spec.guidance_scale_2 or 1) != 1
    if guided and not model.guidance.embedded:
        negative = _inputs(model, model.spec.negative_prompt, image, key)
    tensors = _inputs(model, prompt, image, key)
    return model.conditions.setdefault((prompt, key), Conditioning(tensors, negative))


def _inputs(model: Any, prompt: str, image: Tensor | None, image_key: str) -> dict[str, Tensor]:
    def made() -> dict[str, Tensor]:
        with torch.no_grad():
            tensors = model._encode(prompt, image)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise no_numbers("What is encoded of a prompt", [*model.modules("text"), *model.modules("vae")])
        return tensors

    inputs = model.cache.get((prompt, image_key), made)
    for name, tensor in model.batchable(inputs).items():
        if not tensor.numel():
            raise ModelError(
                f'Nothing of the prompt {prompt!r} reaches the network (its input "{name}" has shape {tuple(tensor.shape)}): the '
                "checkpoint's tokenizer makes no token of it and adds none of its own. Give a prompt that is not empty (for the "
                "negative one model.negative_prompt), or a tokenizer that marks where a text begins or ends."
            )
    return inputs


def open_cache(model: Any) -> EncodingCache:
    """The cache of a model's encodings, keyed by all that they depend on."""
    if model.spec.cache is None:
        return EncodingCache(None, "")
    folder = default_folder() if model.spec.cache == "auto" else Path(model.spec.cache).expanduser()
    # Encoding depends on the configs of the sampling networks but not on their weights; it may read every other component.
    networks, index = model.experts.all, model.index
    files = ["model_index.json", *(f"{name}/config.json" for name in networks)]
    files += [name for name in index if has_component(index, name) and name not in (*networks, "scheduler")]
    # A picture is encoded at the clip's size.
    size = f"{model.video}/{model.pipe.vae.dtype}/{model.spec.vae_tiling}" if max(model.pictures) else ""
    code = f"{type(model).__module__}.{type(model).__name__}/{model.spec.dtype}"
    return EncodingCache(folder, digest(fingerprint(model.folder, files), code, size, model.reading))
