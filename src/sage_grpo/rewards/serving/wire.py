"""Wire format of the remote reward and its server: safetensors bytes, never pickle.

Every request carries a checksum of its clips, prompts and fps, and the answer repeats it, so that a score can never be taken for another clip's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sage_grpo.config.ranges import check_prompt
from sage_grpo.rewards.frames import check_clips
from sage_grpo.types import PartScores
from sage_grpo.utils.json_schema import parse_json

MAX_HEADER = 8 * 2**20


class WireError(ValueError):
    """Bytes that are not valid in this format."""


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn every error of reading untrusted bytes into a WireError."""
    try:
        yield
    except WireError:
        raise
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise WireError(f"{what} is not as it should be: {error}") from error


@dataclass(frozen=True)
class ScoreRequest:
    """Clips to score."""

    checksum: str
    videos: Tensor
    prompts: list[str]
    fps: float


def content_checksum(videos: Tensor, prompts: Sequence[str], fps: float) -> str:
    digest = hashlib.sha256()  # the fastest of hashlib on CPUs with SHA instructions
    digest.update(json.dumps([list(videos.shape), list(prompts), float(fps)]).encode())
    digest.update(videos.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def encode_request(videos: Tensor, prompts: Sequence[str], fps: float) -> tuple[list[bytes | memoryview], str]:
    """A request as pieces to send one after the other, and the checksum that its answer must repeat.

    The pieces are a safetensors file whose only tensor is not copied: clips are large.
    """
    videos = videos.contiguous().cpu()
    checksum = content_checksum(videos, prompts, fps)
    metadata = {"prompts": json.dumps(list(prompts)), "fps": repr(float(fps)), "checksum": checksum}
    tensor = {"dtype": "U8", "shape": list(videos.shape), "data_offsets": [0, videos.numel()]}
    header = json.dumps({"__metadata__": metadata, "videos": tensor}).encode()
    header += b" " * (-len(header) % 8)
    pixels = videos.numpy().data.cast("B") if videos.numel() else b""
    return [struct.pack("<Q", len(header)) + header, pixels], checksum


def decode_request(body: bytes | bytearray) -> ScoreRequest:
    """Read and check a request; WireError names the fault. The clips share a bytearray's memory."""
    body = body if isinstance(body, bytearray) else bytearray(body)  # tensors need memory that can be written
    with _reading("The request"):
        header, start = _header(body)
        metadata = _metadata(header, ("prompts", "fps", "checksum"))
        if header.keys() - {"__metadata__"} != {"videos"}:
            raise WireError(f"A request holds the tensor 'videos' alone, got {sorted(header)}.")
        videos, fps = _videos(header["videos"], body, start), float(metadata["fps"])
        prompts = parse_json(metadata["prompts"], "prompts")
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise WireError("prompts must be a list of strings.")
        check_clips(videos, prompts, fps)
        for prompt in prompts:
            check_prompt(prompt)
        "".join(prompts).encode()  # JSON can spell lone surrogates, which cannot be sent back
    if content_checksum(videos, prompts, fps) != metadata["checksum"]:
        raise WireError("The checksum does not fit the clips, prompts and fps: they were changed in transit.")
    return ScoreRequest(metadata["checksum"], videos, prompts, fps)


def _videos(entry: Any, body: bytearray, start: int) -> Tensor:
    size = len(body) - start
    shape: Any = entry.get("shape") if isinstance(entry, dict) else None
    whole = isinstance(shape, list) and all(type(side) is int and side > 0 for side in shape)
    if not whole or entry.get("dtype") != "U8" or entry.get("data_offsets") != [0, size]:
        raise WireError(f"videos must be U8 and fill the file of {size} bytes, its entry says {str(entry)[:200]}.")
    if math.prod(shape) != size:
        raise WireError(f"videos of shape {str(shape)[:200]} do not have the {size} bytes that are there.")
    return torch.frombuffer(body, dtype=torch.uint8, offset=start, count=size).view(shape)


def encode_response(checksum: str, scores: PartScores) -> bytes:
    tensors = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in scores.items()}
    return save(tensors, metadata={"checksum": checksum, "reasons": json.dumps(dict(scores.reasons))})


def decode_response(body: bytes, *, checksum: str, count: int) -> PartScores:
    """Read an answer; WireError unless it is the answer to this very request."""
    with _reading("The answer"):
        metadata, tensors = _metadata(_header(body)[0], ("checksum", "reasons")), load(body)
        reasons = parse_json(metadata["reasons"], "reasons")
    if metadata["checksum"] != checksum:
        raise WireError("The answer belongs to another request.")
    for name, value in tensors.items():
        if value.dtype != torch.float32 or tuple(value.shape) != (count,):
            raise WireError(f"Part {name!r} has {tuple(value.shape)} values of {value.dtype} for {count} clips.")
    if not isinstance(reasons, dict) or not reasons.keys() <= {str(index) for index in range(count)}:
        raise WireError("reasons must map indices of clips to texts.")
    return PartScores(tensors, {int(index): str(reason) for index, reason in reasons.items()})


def _header(body: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file, and the offset of its tensors."""
    if len(body) < 8:
        raise WireError(f"{len(body)} bytes are not a safetensors file.")
    (length,) = struct.unpack("<Q", body[:8])
    if length > min(MAX_HEADER, len(body) - 8):
        raise WireError(f"The safetensors header claims {length} bytes.")
    header = parse_json(body[8 : 8 + length].decode("utf-8"), "the safetensors header")
    if not isinstance(header, dict):
        raise WireError("The safetensors header is not an object.")
    return header, 8 + length


def _metadata(header: dict[str, Any], keys: Sequence[str]) -> dict[str, str]:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        raise WireError("The file has no metadata.")
    missing = [key for key in keys if not isinstance(metadata.get(key), str)]
    if missing:
        raise WireError(f"The metadata lacks {missing}.")
    return metadata
