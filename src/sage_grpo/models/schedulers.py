"""The scheduler of a diffusers checkpoint: the sigmas that its stock pipeline visits, and its solver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import component_class, in_words
from sage_grpo.models.checkpoints.files import read_json
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.solvers import Velocity
from sage_grpo.utils.pretrained import check_config

SHIFT = {
    "FlowMatchEulerDiscreteScheduler": "shift",
    "UniPCMultistepScheduler": "flow_shift",
    "DPMSolverMultistepScheduler": "flow_shift",
}
"""Supported schedulers, each with its name for the shift."""
TAKES_SIGMAS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")
"""Schedulers that accept sigmas from a pipeline."""
TAKES_MU = ("FlowMatchEulerDiscreteScheduler",)  # schedulers that accept a shift from a pipeline, which they may ignore
BENT = ("shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
"""Settings that change the grid beyond its shift."""
_DETERMINISTIC = ("dpmsolver", "dpmsolver++")
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "use_dynamic_shifting": (False,),  # unless the pipeline passes mu
    "invert_sigmas": (False,),
    "stochastic_sampling": (False,),
}
_MULTISTEP: dict[str, tuple[Any, ...]] = {
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "final_sigmas_type": ("zero",),
    "use_karras_sigmas": (False,),  # in these schedulers such grids ignore flow_shift, or leave [0, 1]
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
    "thresholding": (False,),
    "algorithm_type": _DETERMINISTIC,
}
"""Settings with the values that can be honored."""


def check_scheduler(folder: Path, index: Mapping[str, Any], *, even: bool, dynamic: bool = False) -> None:
    """Refuse, before any weights load, a scheduler whose sampling would silently differ from the stock pipeline's. `dynamic`: the pipeline passes mu,
    which depends on the number of tokens; only FlowMatchEuler takes it with and without use."""
    class_name = index["scheduler"][1]
    supported = TAKES_MU if dynamic else TAKES_SIGMAS if even else tuple(SHIFT)
    if class_name not in supported:
        raise ModelError(
            f'The scheduler of "{folder}" is a {class_name}; supported are {", ".join(supported)}. Save the pipeline with one '
            "of them, for example FlowMatchEulerDiscreteScheduler(shift=5.0)."
        )
    kind = component_class(folder, index, "scheduler")
    with in_words(folder, "scheduler"):
        file = folder / "scheduler" / "scheduler_config.json"
        check_config(config := read_json(file), str(file))
        try:
            scheduler = kind.from_config(config)
        except ImportError as error:  # beta sigmas
            raise ModelError(f'The scheduler of "{folder}" needs a package that is not installed: {error}') from error
    honoured = _EVERYWHERE | (_MULTISTEP if SHIFT[class_name] == "flow_shift" else {})
    honoured |= {"use_dynamic_shifting": (False, True)} if dynamic else {}
    for name, values in honoured.items():
        value = scheduler.config.get(name, values[0])
        if value not in values:
            raise ModelError(
                f'scheduler/scheduler_config.json of "{folder}" sets {name} to {value!r}, which is not supported in a '
                f"{class_name} here: only {' or '.join(map(repr, values))}. Change it there, or use another checkpoint."
            )


def scheduler_shift(config: Mapping[str, Any], tokens: int) -> float | None:
    """The shift that a scheduler applies; a dynamic one grows with the number of tokens (of an image or a clip)."""
    if not config.get("use_dynamic_shifting", False):
        return config.get("shift", config.get("flow_shift"))
    (low, base), (high, most) = (
        (config["base_image_seq_len"], config["base_shift"]),
        (config["max_image_seq_len"], config["max_shift"]),
    )
    slope = (most - base) / (high - low)
    mu = tokens * slope + (base - slope * low)
    return math.exp(mu) if config["time_shift_type"] == "exponential" else mu


def prepared(scheduler: Any, num_steps: int, shift: float, *, even: bool) -> Any:
    """A fresh copy with another shift and its timesteps set. `even` hands it evenly spaced sigmas, as HunyuanVideo-1.5's pipelines do; otherwise it
    takes its own spacing, as in Wan's. The two give different grids."""
    if num_steps < 1:
        raise ModelError(f"The number of steps must be at least 1, got {num_steps}.")
    if num_steps == 1 and scheduler.config.get("shift_terminal"):
        raise ModelError(
            "The number of steps must be at least 2 here, got 1: this checkpoint's grid is stretched between its first and its last sigma "
            f"(shift_terminal {scheduler.config['shift_terminal']:g} in scheduler/scheduler_config.json)."
        )
    copy = type(scheduler).from_config(scheduler.config, **{SHIFT[type(scheduler).__name__]: shift})
    given: dict[str, Any] = {}
    if scheduler.config.get("use_dynamic_shifting", False):
        given["mu"] = math.log(shift) if scheduler.config.time_shift_type == "exponential" else shift
    if even:
        import numpy

        copy.set_timesteps(sigmas=numpy.linspace(1.0, 0.0, num_steps + 1)[:-1], **given)
    else:
        copy.set_timesteps(num_steps, **given)
    return copy


def own_sigmas(scheduler: Any, num_steps: int, shift: float, *, even: bool) -> Tensor:
    if even and not any(scheduler.config.get(name) for name in BENT):  # only shifted: the same, free of round-off
        return Schedule.shifted(num_steps, shift).sigmas
    sigmas = prepared(scheduler, num_steps, shift, even=even).sigmas.to(torch.float32).cpu()
    # UniPC starts at 1 - 1e-6 to keep its own logarithms finite; the sample starts as pure noise all the same, and
    # kernels handle exactly 1.
    return torch.where(sigmas > 1 - 2e-6, 1.0, sigmas)


class SchedulerSolver:
    """A diffusers scheduler as a Solver, for one sampling: with it, samples equal the stock pipeline's."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.set_begin_index(0)

    @property
    def num_steps(self) -> int:
        return len(self._scheduler.timesteps)

    def step(self, index: int, x: Tensor, velocity: Velocity) -> Tensor:
        done = self._scheduler.step_index or 0
        if index != done:
            raise ValueError(f"Step {index} was asked for after {done} steps: a solver serves one sampling, in order.")
        timestep = self._scheduler.timesteps[index]
        v = velocity(x, self._scheduler.sigmas[index], timestep=timestep)
        return self._scheduler.step(v, timestep, x, return_dict=False)[0]
