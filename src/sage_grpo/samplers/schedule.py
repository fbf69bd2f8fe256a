"""Noise schedules: the sigmas that a rollout visits, and the steps that explore."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Schedule:
    """A strictly decreasing grid of sigmas, with a flag per step that is true for stochastic steps."""

    sigmas: Tensor
    """num_steps + 1 values from at most 1 down to at least 0, float32, on the CPU."""
    stochastic: tuple[bool, ...] = ()
    """One flag per step; steps that are not stochastic use the ODE. Empty means all."""

    def __post_init__(self) -> None:
        sigmas = torch.as_tensor(self.sigmas, dtype=torch.float32, device="cpu")
        if sigmas.ndim != 1 or len(sigmas) < 2:
            raise ValueError(f"A schedule needs at least two sigmas in one row, got shape {tuple(sigmas.shape)}.")
        if not bool(torch.isfinite(sigmas).all()) or float(sigmas.max()) > 1 or float(sigmas.min()) < 0:
            raise ValueError(f"Sigmas must lie in [0, 1], got {float(sigmas.min()):g} to {float(sigmas.max()):g}.")
        if not bool((sigmas.diff() < 0).all()):
            index = int((sigmas.diff() >= 0).nonzero()[0, 0])
            raise ValueError(
                f"Sigmas must decrease strictly, but sigma[{index}] = {float(sigmas[index]):g} is followed by "
                f"{float(sigmas[index + 1]):g}. Use fewer steps or a smaller shift if float32 cannot tell them apart."
            )
        flags = tuple(bool(flag) for flag in self.stochastic) or (True,) * (len(sigmas) - 1)
        if len(flags) != len(sigmas) - 1:
            raise ValueError(f"{len(flags)} stochastic flags for {len(sigmas) - 1} steps: give one flag per step.")
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "stochastic", flags)

    @classmethod
    def shifted(cls, num_steps: int, shift: float = 1.0) -> Schedule:
        """An even grid from 1 to 0 bent by `shift`: s -> shift s / (1 + (shift - 1) s).

        This is the grid that diffusers' video pipelines pass to their scheduler as explicit sigmas; a scheduler's own
        `set_timesteps(n)` gives another one.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
        if not (math.isfinite(shift) and shift > 0):
            raise ValueError(f"shift must be positive, got {shift} (1 leaves the grid even; video models use 3 to 12).")
        s = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64)
        return cls(shift * s / (1.0 + (shift - 1.0) * s))

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """(sigma, sigma_next) of a step, as float32 scalars on the CPU."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"Step {index} does not exist: the schedule has steps 0 to {self.num_steps - 1}.")
        return self.sigmas[index], self.sigmas[index + 1]

    def exploring(self, steps: Sequence[bool], *, deterministic_last: bool = False) -> Schedule:
        """The same grid with other stochastic steps; `deterministic_last` makes a step that ends at sigma = 0 an ODE step."""
        flags = list(steps)
        if deterministic_last and flags and float(self.sigmas[-1]) == 0.0:
            flags[-1] = False
        return replace(self, stochastic=tuple(flags))

    def exploring_range(self) -> tuple[int, int]:
        """First stochastic step, and the step after the last; (num_steps, num_steps) where all are deterministic."""
        chosen = [index for index, flag in enumerate(self.stochastic) if flag]
        return (chosen[0], chosen[-1] + 1) if chosen else (self.num_steps, self.num_steps)

    def around(self, before: int | None, after: int | None) -> Schedule:
        """The same stochastic steps, with other numbers of deterministic steps before and after them, evenly in the old step's index; None leaves
        a part."""
        first, stop = self.exploring_range()
        parts = [
            _respaced(self.sigmas[: first + 1], before),
            self.sigmas[first + 1 : stop],
            _respaced(self.sigmas[stop:], after),
        ]
        flags = [False] * (len(parts[0]) - 1) + list(self.stochastic[first:stop]) + [False] * (len(parts[2]) - 1)
        return Schedule(torch.cat(parts), tuple(flags))


def _respaced(sigmas: Tensor, steps: int | None) -> Tensor:
    old = len(sigmas) - 1
    if steps is None or old < 1 or steps == old:
        return sigmas
    place = torch.linspace(0, old, steps + 1, dtype=torch.float64)
    low = place.floor().long().clamp(max=old - 1)
    values = sigmas.to(torch.float64)
    result = (values[low] + (values[low + 1] - values[low]) * (place - low)).to(sigmas.dtype)
    result[0], result[-1] = sigmas[0], sigmas[-1]
    return result
