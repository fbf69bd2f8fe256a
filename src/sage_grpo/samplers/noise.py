"""Noise keyed by its purpose, so that a run does not depend on ranks, batches or interruptions."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as (seed, iteration, group, member, purpose); stable over machines and versions."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_noise(shape: tuple[int, ...], *key: int | str) -> Tensor:
    """Standard normal float32 noise for this key. Drawn on the CPU, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(keyed_seed(*key))
    return torch.randn(shape, generator=generator, dtype=torch.float32)
