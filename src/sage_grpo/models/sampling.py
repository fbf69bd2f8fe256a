"""Sampling without exploration, by a solver that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.solvers import GridSolver, Solver, SolverName
from sage_grpo.models.base import BringsSolver, Progress, VelocityModel
from sage_grpo.models.errors import ModelError
from sage_grpo.types import Conditioning


def build_solver(model: VelocityModel, name: SolverName, num_steps: int, shift: float | None = None) -> Solver:
    """A fresh solver on the model's own grid; `shift` overrides the model's. Make one for every batch of samples."""
    if name in ("euler", "ab2"):
        return GridSolver(Schedule(model.sigmas(num_steps, shift)), name)
    if name == "checkpoint":
        if not isinstance(model, BringsSolver):
            raise ModelError(
                f'solver "checkpoint" needs a model that brings one, and {type(model).__name__} has no method '
                '`solver(num_steps, shift)`. Use solver "euler".'
            )
        return model.solver(num_steps, shift)
    raise ModelError(f'solver "{name}" is unknown: use euler, ab2 or checkpoint.')


@torch.no_grad()
def solve(
    model: VelocityModel,
    solver: Solver,
    x: Tensor,
    conditions: Sequence[Conditioning],
    *,
    progress: Progress | None = None,
) -> Tensor:
    """Carry noise x to data."""
    velocity = partial(model.velocity, conditions=conditions)
    for index in range(solver.num_steps):
        x = solver.step(index, x, velocity)
        if progress is not None:
            progress(index + 1, solver.num_steps)
    return x
