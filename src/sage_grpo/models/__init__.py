"""Models: their protocols (base), settings (spec), sampling (policy) and families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class ModelError(ValueError):
    """A model cannot be loaded or used as asked; the message names a remedy."""


def no_numbers(what: str, modules: Iterable[nn.Module]) -> ModelError:
    """The error for a result that holds NaN or infinity. The weights are read only now, to name a broken one."""
    names = (
        f"{type(module).__name__}'s {name}"
        for module in modules
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not bool(tensor.isfinite().all())
    )
    blamed = next(names, None)
    cause = (
        f"{blamed} holds NaN or infinity" if blamed else "its weights are finite, so it is the prompt or model.dtype"
    )
    return ModelError(f"{what} holds NaN or infinity and would be seen as black: {cause}. Load weights that are whole.")
