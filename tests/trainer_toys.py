"""Rewards, a kernel and a sink for trainer tests, as a user would write them: `trainer_toys:function`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_grpo.callbacks.metrics import ShownClips
from sage_grpo.config.ranges import Share
from sage_grpo.samplers.kernels import Dance
from sage_grpo.samplers.transition import Transition

CALLS = {"count": 0}
"""How often `signals` was called; tests set it to 0."""


def bright(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """The mean level of a clip, in [0, 1]."""
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255


def two_parts(videos: Tensor, prompts: Sequence[str], fps: float, offset: float = 0.0) -> dict[str, Tensor]:
    return {"level": bright(videos, prompts, fps) + offset, "texture": videos[..., 0].float().std(dim=(1, 2, 3)) / 255}


def other_parts(videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
    return {"level": bright(videos, prompts, fps) ** 2, "texture": videos[..., 1].float().std(dim=(1, 2, 3)) / 255}


def bright_but(videos: Tensor, prompts: Sequence[str], fps: float, bad: Sequence[int] = ()) -> Tensor:
    level = bright(videos, prompts, fps)
    level[[place for place in bad if place < len(level)]] = torch.nan
    return level


SIZES: list[int] = []
"""Of the groups that `ranked` was asked about."""


def ranked(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """The ranks of a group's clips by their brightness, from 0."""
    SIZES.append(len(prompts))
    return bright(videos, prompts, fps).argsort().argsort().float()


def told(videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[dict]) -> list[float]:
    return [float(row["worth"]) for row in metadata]


def broken(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    raise ConnectionError("the reward's machine is gone")


def flat(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    """The same for everyone: nothing to learn."""
    return [0.5] * len(prompts)


def signals(videos: Tensor, prompts: Sequence[str], fps: float, at: int = 2, then: Callable = bright) -> Tensor:
    """`bright`; on call number `at` the process gets SIGTERM, as from a cluster's scheduler."""
    CALLS["count"] += 1
    if CALLS["count"] == at:
        os.kill(os.getpid(), signal.SIGTERM)
    return then(videos, prompts, fps)


def crashes(videos: Tensor, prompts: Sequence[str], fps: float, at: int = 2, then: Callable = bright) -> Tensor:
    """`bright`; on call number `at` the process ends at once, like a power cut that Python may still clean up after."""
    CALLS["count"] += 1
    if CALLS["count"] == at:
        raise KeyboardInterrupt
    return then(videos, prompts, fps)


def draws(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """`bright`, but careless: it draws from the global random numbers."""
    torch.rand(3)
    return bright(videos, prompts, fps)


def later(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    """Rises from call to call: every evaluation is the best so far."""
    CALLS["count"] += 1
    return [CALLS["count"] + index / 10 for index in range(len(prompts))]


def fades(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    CALLS["count"] += 1
    level = bright(videos, prompts, fps)
    return level if CALLS["count"] <= 8 else torch.full_like(level, 0.5)


@dataclass(frozen=True)
class Quiet:
    """A kernel of one's own: dance with noise that falls from where the grid starts."""

    eta: Share = 0.5
    """Exploration scale."""
    first: float = 1.0
    """Where the grid starts."""
    leaves_noise: ClassVar[bool] = True

    def __call__(self, sigma: float | Tensor, sigma_next: float | Tensor) -> Transition:
        return Dance(0.9 * self.eta * self.first)(sigma, sigma_next)


class Kept:
    """A sink of one's own."""

    rows: ClassVar[list[tuple[int, dict[str, float]]]] = []
    closed: ClassVar[list[Path]] = []

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        assert config["out"] == str(folder)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((iteration, dict(metrics)))

    def show(self, iteration: int, clips: ShownClips) -> None:
        """Clips stay in the run's folder."""

    def close(self) -> None:
        self.closed.append(self.folder)
