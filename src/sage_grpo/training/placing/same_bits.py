"""Gradients that are the same bits every time, also on a GPU.

A GPU's backward pass of attention adds up parts in the order in which they are ready. That order changes (now and then at the miniature's size, always at that of a real
model), with it the last bit of a gradient, and two runs of one seed part. Forward passes, and with them rollouts and replays, do not depend on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _deterministic

from sage_grpo.configure import ConfigError

DEVICES = ("cuda",)
"""A CPU adds in one order anyway."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
deterministic: Any = _deterministic
"""Its one setting is made when it is imported, which type checkers do not see."""
_turned_off: list[bool] = []
"""Whether cuDNN's attention is off because of us: a later run of this process may have it again."""


def get_ready(*, wanted: bool) -> None:
    """Before the first matrix product of a process, because cuBLAS looks once at what it is told about its memory. PyTorch must not choose
    cuDNN's attention, which has no fixed order and does not say so."""
    if wanted:
        os.environ.setdefault(WORKSPACE, ":4096:8")
    if wanted and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        _turned_off.append(True)
    elif not wanted and _turned_off:
        torch.backends.cuda.enable_cudnn_sdp(True)
        _turned_off.clear()


@contextmanager
def same_bits(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """Backward passes in here add up in a fixed order; one that cannot is refused by its name."""
    if not wanted or device.type not in DEVICES:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # would write all memory twice
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise ConfigError(
            f"model.deterministic cannot be kept, because the backward pass of this model has a part without a fixed order: {error} "
            "Use --model.deterministic false; runs of one seed may then differ in the last digits."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled
