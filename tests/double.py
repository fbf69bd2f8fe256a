"""Everything in float64: an oracle then agrees to 1e-9 on every machine, in whatever order a library adds its numbers up.

The package computes in float32 and says so in many places; so do diffusers' networks. Inside `double()` the name torch.float32 means
float64, for both: nothing in the product knows of it. Checkpoints are read outside (their files hold float32) and widened afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sage_grpo.models import decoding, devices, family
from sage_grpo.models.spec import ModelSpec

CLOSE = 1e-9
"""How far two ways to the same number may be apart here: a million roundings of float64, a hundredth of one of float32."""

_NAMES = ("float32", "float")
_SINGLE, _METHODS = torch.float32, (torch.Tensor.float, nn.Module.float)


@contextmanager
def double() -> Iterator[None]:
    """float32 is float64 inside."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(nn.Module, "float", nn.Module.double)
        patch.setitem(devices.DTYPES, "float32", torch.float64)
        patch.setattr(decoding, "_onednn", lambda: False)  # it has no float64
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def single() -> Iterator[None]:
    """Inside `double`, for what reads a file of float32: the names mean again what they say."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(torch, name, _SINGLE)
        for kind, method in zip((torch.Tensor, nn.Module), _METHODS):
            patch.setattr(kind, "float", method)
        patch.setitem(devices.DTYPES, "float32", _SINGLE)
        before = torch.get_default_dtype()
        torch.set_default_dtype(_SINGLE)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def whole() -> Iterator[None]:
    """`double`, and models that are loaded inside are widened."""
    load, load_component = ModelSpec.load, family.load_component

    def wide(self: ModelSpec, device: Any = None, *, sharded: bool = False) -> Any:
        with single():
            model = load(self, device, sharded=sharded)
        return widened(model)

    def wide_component(folder: Path, index: Any, name: str, dtype: torch.dtype) -> Any:
        """An encoder, which is loaded when the first prompt comes."""
        with single():
            return load_component(folder, index, name, _SINGLE).double()

    with pytest.MonkeyPatch.context() as patch, double():
        patch.setattr(ModelSpec, "load", wide)
        patch.setattr(family, "load_component", wide_component)
        yield


def in_double(worker: Callable[..., Any]) -> Callable[..., Any]:
    """What a rank does, with all of it in float64."""

    @wraps(worker)
    def called(*given: Any, **named: Any) -> Any:
        with whole():
            return worker(*given, **named)

    return called


def widened(model: Any) -> Any:
    """A loaded model, with all its weights in float64."""
    for module in (model.network, *model.others, *getattr(getattr(model, "pipe", None), "components", {}).values()):
        if isinstance(module, nn.Module):
            module.double()
    model.dtype = torch.float64
    return model
