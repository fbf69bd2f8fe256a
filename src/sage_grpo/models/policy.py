"""Sampling: means, log-probabilities and samples from model, kernel and schedule, and solvers for sampling without exploration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sage_grpo.data.prompts import Prompt
from sage_grpo.models import ModelError, no_numbers
from sage_grpo.models.base import Progress, VelocityModel, abilities
from sage_grpo.samplers.kernels import Kernel, Ode
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.solvers import GridSolver, Solver, SolverName
from sage_grpo.samplers.transition import Gaussian, Transition
from sage_grpo.types import Conditioning
from sage_grpo.utils.video import read_pictures


@dataclass(frozen=True)
class Step:
    """One step of a rollout or of its replay."""

    gaussian: Gaussian  # the law of x_next
    velocity: Tensor  # v at x, float32


@dataclass(frozen=True)
class Policy:
    """A stochastic sampler. Exploring steps of a rollout and their replays take the same velocity through the same `at`, so their
    log-probabilities agree to the bit."""

    model: VelocityModel
    kernel: Kernel
    schedule: Schedule
    guidance: float | None = None  # overrides the model's guidance scale; 1 is none
    places: tuple[slice, ...] = ()
    """Parts of a state that explore, each with a log-probability of its own; empty is all of it, in one."""

    def transition(self, index: int) -> Transition:
        kernel = self.kernel if self.schedule.stochastic[index] else Ode()
        return kernel(*self.schedule.pair(index))

    def sigma(self, index: int) -> float:
        return float(self.schedule.sigmas[index])

    def sigmas(self, index: int) -> tuple[float, float]:
        return self.sigma(index), self.sigma(index + 1)

    def is_noisy(self, index: int) -> bool:
        return float(self.transition(index).std) > 0

    def step(self, index: int, x: Tensor, conditions: Sequence[Conditioning]) -> Step:
        sigma, _ = self.schedule.pair(index)
        return self.at(index, x, self.model.velocity(x, sigma, conditions, guidance=self.guidance))

    def at(self, index: int, x: Tensor, v: Tensor) -> Step:
        law = self.transition(index)(x, v)
        if not self.places:
            return Step(gaussian=law, velocity=v)
        mean = Ode()(*self.schedule.pair(index))(x, v).mean  # parts that do not explore follow the ODE
        for place in self.places:
            mean = torch.cat([mean[:, : place.start], law.mean[:, place], mean[:, place.stop :]], dim=1)
        return Step(gaussian=Gaussian(mean, law.std, law.batch_ndim, self.places), velocity=v)


def integrate(
    policy: Policy,
    x: Tensor,
    conditions: Sequence[Conditioning],
    noise: Callable[[int], Tensor] | None = None,
    progress: Progress | None = None,
) -> Tensor:
    with torch.no_grad():
        for index in range(policy.schedule.num_steps):
            gaussian = policy.step(index, x, conditions).gaussian
            if not policy.is_noisy(index):
                x = gaussian.mean
            elif noise is None:
                raise ValueError(f"Step {index} is stochastic: pass noise, a function from the step to standard noise.")
            else:
                x = gaussian.sample(noise(index))
            _check_finite(policy.model, x, index + 1)
            if progress is not None:
                progress(index + 1, policy.schedule.num_steps)
    return x


def _check_finite(model: VelocityModel, x: Tensor, step: int) -> None:
    if not bool(x.isfinite().all()):
        raise no_numbers(f"The sample after step {step}", [model.network, *model.others])


def build_solver(model: VelocityModel, name: SolverName, num_steps: int, shift: float | None = None) -> Solver:
    if name != "checkpoint":
        return GridSolver(Schedule(model.sigmas(num_steps, shift)), name)
    solver = abilities(model).solver
    if solver is None:
        raise ModelError(
            f'solver "checkpoint" needs a model that brings one, and {type(model).__name__} has no ability '
            '`solver(num_steps, shift)`. Use solver "euler".'
        )
    return solver(num_steps, shift)


def pictures_of(prompt: Prompt) -> Tensor | None:
    return read_pictures(prompt.image, prompt.last_image)


def conditions_of(model: VelocityModel, prompts: Sequence[Prompt]) -> list[Conditioning]:
    return model.encode([prompt.text for prompt in prompts], [pictures_of(prompt) for prompt in prompts])


@torch.no_grad()
def solve(
    model: VelocityModel,
    solver: Solver,
    x: Tensor,
    conditions: Sequence[Conditioning],
    *,
    progress: Progress | None = None,
) -> Tensor:
    velocity = partial(model.velocity, conditions=conditions)
    for index in range(solver.num_steps):
        x = solver.step(index, x, velocity)
        _check_finite(model, x, index + 1)
        if progress is not None:
            progress(index + 1, solver.num_steps)
    return x
