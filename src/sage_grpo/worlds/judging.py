"""What the judges of all worlds have in common: checks, prompts outside the grammar, beliefs to scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Named(Protocol):
    """A scene, as far as a judge needs it."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The index of each attribute's value, in the order of the world's ATTRIBUTES."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What prompts ask for."""

    values: dict[str, Tensor]
    """For every attribute the index of its value, int64, B; 0 where a prompt is not understood."""
    understood: Tensor
    """bool, B."""
    reasons: dict[int, str]
    """Why prompts are outside the world's grammar, by their place."""

    def part(self, name: str, beliefs: Tensor) -> Tensor:
        """How far a clip shows the wanted value of an attribute, from beliefs B x values; NaN where not understood."""
        match = beliefs.gather(1, self.values[name].unsqueeze(1)).squeeze(1)
        return match.masked_fill(~self.understood, torch.nan)


class Reader:
    """Prompts of one world to what they ask for; each sentence is read once."""

    def __init__(self, world: str, attributes: Sequence[str], from_text: Callable[[str], Named]) -> None:
        self._world = world
        self._attributes = tuple(attributes)

        @lru_cache(maxsize=65536)
        def read(prompt: str) -> tuple[int, ...] | str:
            try:
                return from_text(prompt).indices
            except ValueError as error:
                return str(error)

        self._read = read

    def __call__(self, prompts: Sequence[str], device: torch.device) -> Wanted:
        """What these prompts ask for."""
        rows = [self._read(prompt) for prompt in prompts]
        blank = (0,) * len(self._attributes)
        table = torch.tensor([blank if isinstance(row, str) else row for row in rows], dtype=torch.int64)
        columns = table.reshape(-1, len(self._attributes)).to(device).unbind(1)
        known = torch.tensor([not isinstance(row, str) for row in rows], dtype=torch.bool).to(device)
        reasons = {
            place: f"the prompt is outside the grammar of the {self._world} world: {row}"
            for place, row in enumerate(rows)
            if isinstance(row, str)
        }
        return Wanted(values=dict(zip(self._attributes, columns)), understood=known, reasons=reasons)


def alignment(
    wanted: Wanted, beliefs: Mapping[str, Tensor], weights: Mapping[str, float], gate: Tensor
) -> dict[str, Tensor]:
    """TA and its parts TA/NAME: how far clips show what was asked for, where there is something at all (`gate`, B)."""
    parts: dict[str, Tensor] = {}
    total = torch.zeros_like(gate)
    for name, weight in weights.items():
        parts[f"TA/{name}"] = wanted.part(name, beliefs[name]) * gate
        total = total + weight * parts[f"TA/{name}"]
    return {"TA": total, **parts}


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The shortest and smallest clips that a judge can score."""

    frames: int
    """Least number of frames."""
    side: int
    """Least height and width."""
    why: str
    """What cannot be told with fewer frames."""


def check_clips(videos: Tensor, prompts: Sequence[str], smallest: Smallest) -> None:
    """Raise a ValueError for clips that no judge could score, or that are shorter or smaller than this one can."""
    if videos.dtype != torch.uint8 or videos.ndim != 5 or videos.shape[-1] != 3:
        raise ValueError(
            f"Expected uint8 clips B x F x H x W x 3, got {videos.dtype} {tuple(videos.shape)}; "
            "to_uint8 converts floats in [0, 1]."
        )
    if len(videos) != len(prompts):
        raise ValueError(f"Got {len(videos)} clips but {len(prompts)} prompts; give one prompt a clip.")
    _, length, height, width, _ = videos.shape
    if length < smallest.frames or min(height, width) < smallest.side:
        raise ValueError(
            f"Clips of {length} frames at {height}x{width} are too small to judge; "
            f"use at least {smallest.frames} frames ({smallest.why}) and {smallest.side} pixels a side."
        )


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[n, index[n]]."""
    return values[torch.arange(len(index), device=index.device), index]


def ramp(value: Tensor, start: float, stop: float) -> Tensor:
    """0 below start, 1 above stop, smooth between."""
    t = ((value - start) / (stop - start)).clamp(0, 1)
    return t * t * (3 - 2 * t)
