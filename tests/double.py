"""Everything in float64: an oracle then agrees to 1e-9 on every machine, in whatever order a library adds its numbers up.

The package computes in float32 and says so in many places; so do diffusers' networks. Inside `double()` the name torch.float32 means
float64, for both: nothing in the product knows of it. Checkpoints are read outside (their files hold float32) and widened afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from sage_grpo.models import devices
from sage_grpo.models.checkpoints import checkpoint
from sage_grpo.models.network import decoding
from sage_grpo.models.spec import ModelSpec

CLOSE = 1e-9
"""How far two ways to the same number may be apart here: a million roundings of float64, a hundredth of one of float32."""

_NAMES = ("float32", "float")
_SINGLE, _NUMPY_SINGLE, _METHODS = torch.float32, np.float32, (torch.Tensor.float, nn.Module.float)


@contextmanager
def double() -> Iterator[None]:
    """float32 is float64 inside."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(torch, name, torch.float64)
        patch.setattr(np, "float32", np.float64)  # schedulers make their grids with it
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
        patch.setattr(np, "float32", _NUMPY_SINGLE)
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
    """`double`; checkpoints are built and read in float32 as ever, and the models that come of them are widened."""
    load, load_component, build, pipeline = ModelSpec.load, checkpoint.load_component, tiny.build, tiny.pipeline

    def wide(self: ModelSpec, device: Any = None, *, sharded: bool = False) -> Any:
        model = in_single(load)(self, device, sharded=sharded)
        model.dtype = torch.float64
        for module in (model.network, *model.others):
            module.double()
        _widened(getattr(model, "pipe", None))
        return model

    def wide_component(folder: Path, index: Any, name: str, dtype: torch.dtype) -> Any:
        return in_single(load_component)(folder, index, name, _SINGLE).double()

    with pytest.MonkeyPatch.context() as patch, double():
        patch.setattr(ModelSpec, "load", wide)
        patch.setattr(checkpoint, "load_component", wide_component)
        patch.setattr(tiny, "build", in_single(build))
        patch.setattr(tiny, "pipeline", lambda folder: _widened(in_single(pipeline)(folder)))
        patch.setattr(tiny, "shared_pipeline", _shared_pipeline)
        yield


@lru_cache(maxsize=32)
def _shared_pipeline(folder: Path) -> Any:
    return tiny.pipeline(folder)


def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a rank does, with all of it in float64."""
    return _inside(whole, function)


def in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """What must not notice that it is called inside `double`."""
    return _inside(single, function)


def _inside(context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        with context():
            return function(*given, **named)

    return called


def _widened(pipe: Any) -> Any:
    for module in getattr(pipe, "components", {}).values():
        if isinstance(module, nn.Module):
            module.double()
    if pipe is not None:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)  # it made numbers when it was read
    return pipe
