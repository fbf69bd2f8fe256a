"""Deterministic solvers of the flow, from noise to data without exploration.

Deterministic steps are never replayed, so a solver needs no log-probability. A second-order method corrects the Euler step, which
is the mean of the ODE's transition, by the velocity of the step before: a step still costs one velocity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule

Velocity = Callable[..., Tensor]
"""(x, sigma) -> v. A solver that a model brings may pass further keywords that this model understands."""
Rule = Literal["euler", "ab2"]
"""Rules for deterministic steps on any grid: Euler, and Adams-Bashforth of order two for uneven steps."""
SolverName = Literal["euler", "ab2", "checkpoint"]
"""Solvers that a configuration may name; `sage_grpo.models.policy.build_solver` makes them."""


class Stepper:
    """Deterministic steps one after another along one smooth path; a stochastic step starts a new path."""

    def __init__(self, rule: Rule = "euler") -> None:
        self.rule = rule
        self._before: tuple[Tensor, float] | None = None

    def __call__(self, euler: Tensor, v: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """x at sigma_next, from the Euler step `euler` and the velocity v at sigma.

        Adams-Bashforth: x + h v + h^2 / (2 h_before) (v - v_before). The first step of a path is an Euler step.
        """
        if self.rule == "euler":
            return euler
        h, before = sigma_next - sigma, self._before
        self._before = v, h
        if before is None:
            return euler
        v_before, h_before = before
        return euler + (0.5 * h * h / h_before) * (v - v_before)


class Solver(Protocol):
    """Integrates dx/dsigma = v over a grid. One object serves one sampling: multistep solvers remember velocities."""

    @property
    def num_steps(self) -> int: ...

    def step(self, index: int, x: Tensor, velocity: Velocity) -> Tensor:
        """x after step `index`; steps come in order, from 0."""


class GridSolver:
    """A rule on a schedule; with Euler it is the ODE kernel, to the bit."""

    def __init__(self, schedule: Schedule, rule: Rule = "euler") -> None:
        self.schedule, self._stepper = schedule, Stepper(rule)

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    def step(self, index: int, x: Tensor, velocity: Velocity) -> Tensor:
        sigma, sigma_next = self.schedule.pair(index)
        v = velocity(x, sigma)
        return self._stepper(Ode()(sigma, sigma_next)(x, v).mean, v, float(sigma), float(sigma_next))
