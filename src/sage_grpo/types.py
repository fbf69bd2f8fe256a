"""Small frozen records shared by prompts, rollouts, rewards and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Keep = Literal["input", "attention", "all"]
"""Activations that a block keeps for its backward pass: its input only (the rest is computed again), also the outputs of attention
(slow to compute and small), or everything. Gradients are the same."""


@dataclass(frozen=True, kw_only=True)
class VideoSpec:
    """The format of a clip: frames and sizes in pixel space."""

    frames: int
    height: int
    width: int
    fps: float = 24.0
    """Frames per second; a contract with the rewards, which sample frames by time."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"VideoSpec.{name} must be positive, got {value}.")


@dataclass(frozen=True)
class Sound:
    """The sound of one clip or of several."""

    waves: Tensor
    """Clips x channels x samples (of one clip: channels x samples), float32 within -1 and 1, on the CPU."""
    rate: int  # samples per second

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, rows: int | slice | list[int]) -> Sound:
        return Sound(self.waves[rows], self.rate)


@dataclass(frozen=True)
class Conditioning:
    """The inputs of a model for ONE sample besides x and sigma.

    Tensors carry no batch dimension and no padding: only valid text tokens are kept, so attention needs no mask.
    All members of a group share one object, which lets a model recognize equal conditions by identity.
    """

    tensors: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None = None
    """Inputs of the unconditional branch for classifier-free guidance; None when guidance is off."""


@dataclass(frozen=True)
class BatchScores:
    """Rewards of a batch of clips."""

    parts: Mapping[str, Tensor]
    """Every named score, float32, one value a clip; NaN where the reward failed."""
    total: Tensor
    """The weighted sum that is optimized, float32; NaN where it is not valid."""
    valid: Tensor  # bool


class PartScores(dict[str, Tensor]):
    """Named scores that a reward may return, with the reasons why single clips could not be scored."""

    def __init__(self, parts: Mapping[str, Tensor], reasons: Mapping[int, str] | None = None) -> None:
        super().__init__(parts)
        self.reasons: dict[int, str] = dict(reasons or {})


@runtime_checkable
class Reward(Protocol):
    """Scores clips. Higher is better; NaN marks a clip that could not be scored.

    With an attribute `reads = "latents"` it gets float32 in the shape and the scale of the model's samples, and nothing is
    decoded for it. With `compares = True` every call has all clips of one group (in any order), and no others.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that a call returns."""

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score uint8 clips B x F x H x W x 3; every returned tensor is float32 with B values."""


@runtime_checkable
class Placeable(Protocol):
    """A reward with weights that can be moved to a device."""

    def to(self, device: torch.device) -> object: ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward whose scores have a gradient by the pixels."""

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """As a call, for float clips B x F x H x W x 3 in [0, 255] (or latents, where it reads these), with a graph from the scores to them."""


@runtime_checkable
class ReadsFrames(Protocol):
    """A reward that reads some of a clip's frames: the others need not be decoded, and may be black."""

    def frames_read(self, count: int, fps: float) -> Sequence[int] | None:
        """Indices of the frames by which a clip of `count` frames is scored; None is all of them."""


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """The origin of the file or folder that an option of a reward names."""

    text: str
    """The origin in words; {value} stands for the option's value."""
    hub: str = ""
    """A file of the repository, to find it in the hub's cache; empty where only a path is accepted."""
    repo: str = ""
    """The repository on the hub that a folder at this path is a copy of: `sage-grpo download` can make it, and a name on the hub needs its commit."""


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """Facts about a built-in reward, known before it is loaded; every built-in reward has them as `facts`."""

    what: str  # the quality that it measures
    parts: str  # the scores that it returns
    files: Mapping[str, FileSource] = field(default_factory=dict)  # by the option that names them
    parameters: float = 0.0  # of its networks, with the model that is named first
    gigabytes: float = 0.0  # GPU memory of these weights at their default precision, without activations
    extra: str = ""  # optional dependencies, as `pip install "sage-grpo[EXTRA]"`
    module: str = ""  # that the extra installs
    network: str = ""
    """The data that leaves the machine, and its destination. Such a reward splits batches itself, is never called twice for one clip, and must
    answer a trial call."""
    licence: str = "part of this project"
    """License of the weights, as far as known; their own pages decide."""
