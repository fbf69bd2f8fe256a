"""Small frozen records that travel along the line prompts -> rollout -> rewards -> update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VideoSpec:
    """The format of a clip."""

    frames: int
    """Number of frames in pixel space."""
    height: int
    """Height in pixels."""
    width: int
    """Width in pixels."""
    fps: float = 24.0
    """Frames per second; a contract with the rewards, which sample frames by time."""

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width", "fps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"VideoSpec.{name} must be positive, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Conditioning:
    """What a model needs to know about ONE sample besides x and sigma.

    Tensors carry no batch dimension and no padding: only valid text tokens are kept, so attention needs no mask.
    All members of a group share one object, which lets a model recognise equal conditions by identity.
    """

    tensors: Mapping[str, Tensor]
    """Inputs of the conditional branch."""
    negative: Mapping[str, Tensor] | None = None
    """Inputs of the unconditional branch for classifier-free guidance; None when guidance is off."""


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of clips."""

    parts: Mapping[str, Tensor]
    """Every named score, float32, one value a clip; NaN where the reward failed."""
    total: Tensor
    """The weighted sum that is optimised, float32; NaN where it is not valid."""
    valid: Tensor
    """bool; False where any weighted part failed or is not finite."""


class PartScores(dict[str, Tensor]):
    """What a reward may return: named scores together with the reasons why single clips could not be scored."""

    def __init__(self, parts: Mapping[str, Tensor], reasons: Mapping[int, str] | None = None) -> None:
        super().__init__(parts)
        self.reasons: dict[int, str] = dict(reasons or {})


@runtime_checkable
class Reward(Protocol):
    """Scores clips. Higher is better; NaN marks a clip that could not be scored."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that a call returns."""
        ...

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score uint8 clips B x F x H x W x 3; every returned tensor is float32 with B values."""
        ...
