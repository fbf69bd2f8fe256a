"""Moves between a GPU and the CPU's memory that keep neither of them waiting.

A copy that does not block comes true in the order of the GPU's work. Types are changed on the GPU, never on the way: the CPU would
read what has not arrived yet.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """x where it is computed with. From pinned memory: the copy waits in line with the GPU's work, this process goes on."""
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True).to(dtype or x.dtype)


def to_storage(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """x where it is kept. Call `settle` before the CPU reads it; `to_device` needs no waiting."""
    return x.to(dtype or x.dtype).to(device, non_blocking=True)  # PyTorch makes this copy a pinned one


def settle(device: torch.device) -> None:
    """Wait until everything that was sent from this device has arrived."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
