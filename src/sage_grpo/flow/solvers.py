"""Deterministic solvers of the flow: how a sample goes from noise to data without exploration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from sage_grpo.flow.kernels import Ode
from sage_grpo.flow.schedule import Schedule

Velocity = Callable[..., Tensor]
"""(x, sigma) -> v. A solver that a model brings may pass further keywords that this model understands."""
SolverName = Literal["euler", "checkpoint"]
"""What a configuration may name; `sage_grpo.models.sampling.build_solver` makes them."""


class Solver(Protocol):
    """Integrates dx/dsigma = v over a grid. One object serves one sampling: multistep solvers remember velocities."""

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        ...

    def step(self, index: int, x: Tensor, velocity: Velocity) -> Tensor:
        """x after step `index`; steps come in order, from 0."""
        ...


@dataclass(frozen=True)
class Euler:
    """The Euler step: the ODE kernel's, to the bit."""

    schedule: Schedule

    @property
    def num_steps(self) -> int:
        """Steps of the schedule."""
        return self.schedule.num_steps

    def step(self, index: int, x: Tensor, velocity: Velocity) -> Tensor:
        """x + (sigma_next - sigma) v."""
        sigma, sigma_next = self.schedule.pair(index)
        return Ode()(sigma, sigma_next)(x, velocity(x, sigma)).mean
