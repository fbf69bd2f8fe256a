"""States with several parts (video, sound): one row of numbers in which each part has its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.models import ModelError


@dataclass(frozen=True)
class StateParts:
    """Shapes and places of the parts of a state, in order.

    The parts of a clip are denoised together and on one grid, so elementwise operations (noise, kernels, solvers, storage) work on the
    whole row; only the network's inputs and outputs, the decoders, and losses of one part alone split it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of one sample's parts, by name."""

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def places(self) -> dict[str, slice]:
        places, start = {}, 0
        for name, shape in self.shapes.items():
            places[name] = slice(start, start := start + math.prod(shape))
        return places

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """The parts of B x size, as views."""
        return {name: rows[:, place].unflatten(1, self.shapes[name]) for name, place in self.places().items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].flatten(1) for name in self.shapes], dim=1)

    def check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.shapes:
                raise ModelError(f'There is no part "{name}" here: the model has {", ".join(self.shapes)}.')
