"""Common parts of a judge by analysis-by-synthesis: clips as tensors, checks, prompts outside the grammar, beliefs to scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from research.scenes.grammar import AnyScene
from sage_grpo.types import PartScores

R = TypeVar("R", bound="Rows")


PIXELS_AT_ONCE = {"cpu": 2**21, "cuda": 2**24}
"""By device: clips are judged in portions of about this many pixels, to bound memory. A portion is thousands of small operations, each of which takes a GPU
as long for one clip as for many."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tensors with one row a clip."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __getitem__(self, index: slice | Tensor | list[int]) -> Self:
        """A sub-batch, by slice, integer tensor, list or mask."""
        return self._each(lambda rows: rows[index])

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return self._each(lambda rows: rows.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields(self)})


def joined(parts: Sequence[R]) -> R:
    """Batches one after another."""
    names = [field.name for field in fields(parts[0])]
    return type(parts[0])(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Attributes that prompts ask for."""

    values: dict[str, Tensor]
    """For every attribute the index of its value, int64, B; 0 where a prompt is not understood."""
    understood: Tensor
    """bool, B."""
    reasons: dict[int, str]
    """Why prompts are outside the world's grammar, by their place."""

    def part(self, name: str, beliefs: Tensor) -> Tensor:
        """Score of how well a clip shows the wanted value of an attribute, from beliefs B x values; NaN where not understood."""
        match = beliefs.gather(1, self.values[name].unsqueeze(1)).squeeze(1)
        return match.masked_fill(~self.understood, torch.nan)


class Reader:
    """Prompts of one world to what they ask for; each sentence is read once."""

    def __init__(self, world: str, attributes: Sequence[str], from_text: Callable[[str], AnyScene]) -> None:
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
        """Attributes that these prompts ask for."""
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
    """Attributes that need more frames."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[R]):
    """Everything a judge finds in a batch of clips before it looks at a prompt."""

    vq: Tensor
    """Visual quality, B."""
    mq: Tensor
    """Motion quality, B."""
    gate: Tensor
    """Mean over the frames of "there is what this world shows, and nothing else", B."""
    drift: Tensor
    """R.m.s. distance to the nearest renderable clip, B."""
    beliefs: dict[str, Tensor]
    """For every attribute B x (its values): how far the clip shows each."""
    nearest: R
    """The nearest renderable clip."""


class Judge(ABC, Generic[R]):
    """A reward that looks at clips of a world, in portions, and compares what they show with their prompts.

    ``VQ``, ``MQ`` and ``TA`` are in [0, 1]; ``TA/NAME`` are the parts of TA, all of them NaN for a prompt that `read` does not understand.
    ``Overall`` = TA + MQ / 2 + VQ / 2. ``drift``, of which LOWER is better, is the r.m.s. distance (pixels in [0, 1]) to the nearest
    renderable clip: how far a policy has left the data manifold. Give it weight 0, or a negative one.
    """

    read: ClassVar[Reader]
    """Attributes that prompts ask for."""
    weights: ClassVar[Mapping[str, float]]
    """Share of each attribute in TA; they sum to one."""
    smallest: ClassVar[Smallest]
    """The clips that it can score."""

    @abstractmethod
    def look(self, videos: Tensor) -> Verdict[R]:
        """Content of clips that fit into memory; as `examine`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that a call returns."""
        return ("VQ", "MQ", "TA", "Overall", "drift", *(f"TA/{name}" for name in self.weights))

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        """Score uint8 clips B x F x H x W x 3 against their prompts."""
        check_clips(videos, prompts, self.smallest)
        if not len(videos):
            return PartScores({name: torch.zeros(0, device=videos.device) for name in self.names})
        return self.parts(self.examine(videos), prompts)

    def parts(self, verdict: Verdict[R], prompts: Sequence[str]) -> PartScores:
        """The scores of what was found."""
        wanted = self.read(prompts, verdict.vq.device)
        parts = {"VQ": verdict.vq, "MQ": verdict.mq, "drift": verdict.drift}
        parts |= alignment(wanted, verdict.beliefs, self.weights, verdict.gate)
        parts["Overall"] = parts["TA"] + 0.5 * verdict.mq + 0.5 * verdict.vq
        return PartScores({name: parts[name].float() for name in self.names}, wanted.reasons)

    @torch.no_grad()
    def examine(self, videos: Tensor) -> Verdict[R]:
        """Content of the clips, without their prompts: uint8 or float in [0, 1], B x F x H x W x 3."""
        most = PIXELS_AT_ONCE.get(videos.device.type, PIXELS_AT_ONCE["cpu"])
        portion = max(1, most // videos[0, ..., 0].numel())
        with torch.autocast(videos.device.type, enabled=False):  # a caller's half precision would blunt the fit
            verdicts = [self.look(part) for part in videos.split(portion)]
        return Verdict(
            **{name: torch.cat([getattr(one, name) for one in verdicts]) for name in ("vq", "mq", "gate", "drift")},
            beliefs={name: torch.cat([one.beliefs[name] for one in verdicts]) for name in self.weights},
            nearest=joined([one.nearest for one in verdicts]),
        )


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
