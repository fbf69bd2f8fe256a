"""The device of a model, and the precision of each of its components."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(name, torch.device) and name.type == "meta":  # a model without weights; a spec cannot name it
        return name
    use = 'Use "auto", "cpu", "cuda" or "cuda:1".'
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each kind of device raises another
        raise ModelError(f'There is no device "{name}" here. {use}') from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "meta" or (device.index or 0) >= max(1, count):
        raise ModelError(f'There is no device "{name}" here: PyTorch sees {count} of that kind. {use}')
    if not count:
        raise ModelError(f'The device is "{name}", but PyTorch sees no CUDA device. Use "auto" or "cpu".')
    return device


def slow_dtype(dtype: str, device: torch.device) -> str:
    if dtype != "bfloat16" or device.type != "cpu":
        return ""
    return "model.dtype bfloat16 is hundreds of times slower than float32 on a CPU: set --model.dtype float32, or take a GPU."


def load_dtypes(
    spec: ModelSpec, device: str | torch.device | None = None, *, trained: Sequence[str] = ("transformer",)
) -> dict[str, torch.dtype]:
    cuda = choose_device(spec.device if device is None else device).type == "cuda"
    return {
        "default": DTYPES[spec.dtype],
        **dict.fromkeys(trained, torch.float32 if master_weights(spec) else DTYPES[spec.dtype]),
        "vae": DTYPES[spec.vae_dtype or (spec.dtype if cuda else "float32")],
    }


def master_weights(spec: ModelSpec) -> bool:
    """True if all weights are trained, which are then float32; a LoRA's base is in the precision of the computation."""
    return spec.train and spec.lora is None


def autocast(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Computation in `dtype` on float32 master weights. Without its cache, which would keep a bfloat16 copy of the whole network until the end of a
    pass that reads every weight once."""
    mixed = master_weights(spec) and dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype, enabled=mixed, cache_enabled=False)


class Home:
    """Pinned copies in CPU memory of weights that never change: a module that leaves a GPU only frees its memory there."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], Tensor] = {}  # copies by module and index of the tensor in it

    def move(self, module: nn.Module, device: torch.device) -> None:
        """Put a module's tensors on a device, if they are not there; "cuda" is any CUDA device."""
        places = {held.device for held in (*module.parameters(), *module.buffers())}
        if all(one.type == device.type and device.index in (None, one.index) for one in places):
            return
        if device.type == "cpu":
            self.leave(module)
        else:
            module._apply(lambda held: held.to(device, non_blocking=True))

    def leave(self, module: nn.Module) -> None:
        places = count()

        def copy(held: Tensor) -> Tensor:
            key = (id(module), next(places))
            if key not in self._copies:
                on_cpu = held.data.cpu()
                self._copies[key] = on_cpu.pin_memory() if held.is_cuda else on_cpu
            return self._copies[key]

        module._apply(copy)
