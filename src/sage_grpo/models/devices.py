"""Where a model computes, and in which precision each of its components is loaded."""

from __future__ import annotations

import torch

from sage_grpo.models.errors import ModelError
from sage_grpo.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str | torch.device) -> torch.device:
    """The device of a spec; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use = 'Use "auto", "cpu", "cuda" or "cuda:1".'
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # whatever a kind of device has to say
        raise ModelError(f'There is no device "{name}" here. {use}') from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "meta" or (device.index or 0) >= max(1, count):
        raise ModelError(f'There is no device "{name}" here: PyTorch sees {count} of that kind. {use}')
    if not count:
        raise ModelError(f'The device is "{name}", but PyTorch sees no CUDA device. Use "auto" or "cpu".')
    return device


def load_dtypes(
    spec: ModelSpec, device: str | torch.device | None = None, *, trained: str = "transformer"
) -> dict[str, torch.dtype]:
    """What to load each component in: float32 where all weights are trained, `dtype` elsewhere; `device` as in load()."""
    full = spec.train and spec.lora is None
    cuda = choose_device(spec.device if device is None else device).type == "cuda"
    return {
        "default": DTYPES[spec.dtype],
        trained: torch.float32 if full else DTYPES[spec.dtype],
        "vae": DTYPES[spec.vae_dtype or (spec.dtype if cuda else "float32")],
    }
