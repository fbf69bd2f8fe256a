"""Where the VAE waits between decodings: on the accelerator if the run leaves room for it, else in the CPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from sage_grpo.models.base import VelocityModel

SHARE = 0.9
"""Of the memory that this process can have; the rest is for what falls between the allocator's blocks."""


class VaeMover:
    """Moves the VAE. It leaves after the first decoding, and stays once an iteration has shown that all its phases have room for it."""

    def __init__(self, model: VelocityModel) -> None:
        self.model = model
        self.stays = False
        self.bytes = 0
        """What the VAE takes on the accelerator, known after it left once."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, the VAE is where the model computes."""
        device = self.model.device
        self.model.place("vae", device)
        yield
        if device.type != "cpu" and not self.stays:
            held = self._held()
            self.model.place("vae", "cpu")
            self.bytes = max(self.bytes, held - self._held())

    def observe(self, times: Mapping[str, float]) -> None:
        """Decide from what the clock says of one iteration: the peaks of its phases, in GiB."""
        peaks = [gib * 2**30 for name, gib in times.items() if name.startswith("time/peak_gib_")]
        if not peaks or not self.bytes:
            return
        away = 0 if self.stays else self.bytes
        self.stays = max(peaks) + away <= SHARE * self._available()

    def _held(self) -> int:
        return torch.cuda.memory_allocated(self.model.device) if self.model.device.type == "cuda" else 0

    def _available(self) -> int:
        """Bytes that are free and that this process holds already; other processes on the device have the rest."""
        free, _ = torch.cuda.mem_get_info(self.model.device)
        return free + torch.cuda.memory_reserved(self.model.device)
