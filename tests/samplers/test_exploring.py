"""Kernels on the grids of real schedulers: nothing explodes at the start, and little noise is held at the end."""

from __future__ import annotations

import functools
import math
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernel_cases import law, some
from sage_grpo.models.schedulers import own_sigmas
from sage_grpo.samplers.kernels import Dance, Flow, Kernel, KernelSpec, Linear, Ode, Sage, SageExact
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.sde_steps import HELD_LIMIT, explore, held_noise, left_out, overfull, swallowed
from sage_grpo.tools.inspect import CLOSE, PROPORTION, final_variance, transitions, variances, warnings

MULTISTEP = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "num_train_timesteps": 1000}
EULER: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
UNIPC: dict[str, Any] = {"_class_name": "UniPCMultistepScheduler", **MULTISTEP}
DPM: dict[str, Any] = {"_class_name": "DPMSolverMultistepScheduler", **MULTISTEP}
TERMINAL = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
LTX: dict[str, Any] = {**EULER, **TERMINAL, "use_dynamic_shifting": True, "shift_terminal": 0.1}
QWEN: dict[str, Any] = {**LTX, "shift_terminal": 0.02, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9}
SCHEDULERS: dict[str, tuple[dict[str, Any], bool]] = {
    "Hunyuan": (EULER, True),  # HunyuanVideo-1.5, FLUX: the pipeline hands over even sigmas
    "SD3": (EULER, False),  # SD3, SD3.5, and Wan saved with this scheduler
    "Wan": (UNIPC, False),
    "Wan, DPM": (DPM, False),
    "LTX": (LTX, True),
    "Qwen-Image": (QWEN, True),
}
"""The scheduler of every family, as published, and whether its pipeline hands over evenly spaced sigmas."""
RANGES = {
    "flow": (0.3, 0.7),
    "linear": (0.5, 1.0),
    "dance": (0.1, 0.5),
    "sage": (0.3, 0.7),
    "cps": (0.2, 0.9),
    "sage_exact": (0.3, 1.5),
}
"""What methods use."""


@functools.cache
def grid_of(name: str, steps: int, shift: float) -> Schedule:
    config, even = SCHEDULERS[name]
    scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    return Schedule(own_sigmas(scheduler, steps, shift, even=even))


@st.composite
def samplers(draw: st.DrawFn) -> tuple[str, Kernel, Schedule]:
    grid = grid_of(
        draw(st.sampled_from(sorted(SCHEDULERS))),
        draw(st.integers(4, 50)),
        draw(st.sampled_from((1.0, 3.0, 5.0, 8.0, 12.0))),
    )
    name = draw(st.sampled_from(sorted(RANGES)))
    kernel = KernelSpec(name=name, eta=draw(st.floats(*RANGES[name]))).build(grid)  # type: ignore[arg-type]
    return name, kernel, explore(grid, [True] * grid.num_steps, kernel, None)


@pytest.mark.slow
@law
@given(samplers())
def test_no_step_is_out_of_proportion_without_a_warning(case: tuple[str, Kernel, Schedule]) -> None:
    _, kernel, schedule = case
    step = transitions(kernel, schedule)
    explores = (step.std > 0).tolist()
    wild = False
    for values in (step.std.tolist(), step.a.abs().tolist()):
        for index in range(1, len(values) - 1):
            if all(explores[index - 1 : index + 2]):
                wild |= values[index] > PROPORTION * max(values[index - 1], values[index + 1])
        chosen = [value for value, flag in zip(values, explores) if flag]
        if len(chosen) > 1:
            wild |= chosen[0] > PROPORTION * chosen[1] or chosen[-1] > PROPORTION * chosen[-2]
    told = any("Out of proportion" in text for text in warnings(kernel, schedule))
    assert told or not wild


COARSE, EXACT = grid_of("Wan", 6, 3.0), SageExact(0.9)


@some
@given(samplers())
@example(("sage_exact", EXACT, explore(COARSE, [True] * 6, EXACT, None)))  # loses a tenth
def test_a_kernel_that_keeps_the_mixture_ends_where_the_ode_does_or_says_so(case: tuple[str, Kernel, Schedule]) -> None:
    """And whatever the kernel, the noise that its last exploring step holds stays below the limit."""
    _, kernel, schedule = case
    chosen = [index for index, flag in enumerate(schedule.stochastic) if flag]
    if chosen and float(transitions(kernel, schedule).std[chosen[-1]]) > 0:
        assert held_noise(kernel, schedule)[chosen[-1]] <= HELD_LIMIT * (1 + 1e-9)
    if kernel.leaves_noise:
        return
    assert final_variance(kernel, schedule, 0.0) == pytest.approx(0.0, abs=1e-12)
    found, plain = final_variance(kernel, schedule, 1.0), final_variance(Ode(), schedule, 1.0)
    told = any(
        "times the variance that the ODE gives" in text or "not converge" in text for text in warnings(kernel, schedule)
    )
    assert told or abs(found / plain - 1) <= CLOSE * (1 + 1e-9)


@pytest.mark.parametrize("steps", [4, 10, 20, 50])
@pytest.mark.parametrize("shift", [3.0, 8.0])
def test_flow_takes_a_grids_first_step_as_such_wherever_the_grid_starts(steps: int, shift: float) -> None:
    grid = grid_of("Wan, DPM", steps, shift)
    assert 0.99 < float(grid.sigmas[0]) < 1.0
    kernel = KernelSpec(name="flow", eta=0.5).build(grid)
    p, q = (float(value) for value in grid.pair(0))
    first = kernel(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    assert float(first.std) ** 2 == pytest.approx(0.25 * p / (1 - q) * (p - q), rel=1e-9)
    # From exactly 1 the variance is eta^2; just below it must be nearly that, and the state keep its size.
    assert float(first.std) == pytest.approx(0.5, rel=0.05)
    schedule = explore(grid, [True] * steps, kernel, None)
    assert max(variances(kernel, schedule, 1.0)) < 1.3
    # Later steps are what they were.
    assert torch.equal(
        kernel(grid.sigmas[1:-1], grid.sigmas[2:]).std, Flow(0.5)(grid.sigmas[1:-1], grid.sigmas[2:]).std
    )


def test_held_noise_is_the_variance_of_point_data_over_what_the_network_is_told() -> None:
    grid = Schedule(torch.tensor([0.8, 0.5, 0.1, 0.0]))
    kernel = Dance(0.6)
    step = kernel(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))
    mean = float(step.a) * 0.5 + float(step.b)  # v = x / sigma where the data are 0
    assert float(held_noise(kernel, grid)[1]) == pytest.approx((mean**2 + float(step.std) ** 2) / 0.01, rel=1e-6)
    assert held_noise(Ode(), grid).tolist() == pytest.approx([1, 1, 1])
    assert math.isinf(float(held_noise(kernel, grid)[2]))


def test_only_the_end_of_a_grid_is_left_out_and_only_unless_asked_otherwise() -> None:
    grid, kernel, everything = grid_of("SD3", 10, 3.0), Sage(0.5), [True] * 10
    assert overfull(kernel, grid) == [8]
    for explored, by, asked, flags in (
        (everything, kernel, None, [True] * 8 + [False] * 2),
        (everything, kernel, True, [True] * 9 + [False]),
        (everything, kernel, False, everything),
        (everything, SageExact(0.5), None, everything),
        ([False] * 7 + [True, True, False], kernel, None, [False] * 7 + [True, False, False]),
    ):
        assert explore(grid, explored, by, asked).stochastic == tuple(flags)
    said = left_out(grid, everything, kernel, None) or ""
    assert "step 8 is" in said
    assert "152" in said
    assert left_out(grid, everything, kernel, True) is left_out(grid, [True] * 8 + [False] * 2, kernel, None) is None
    # Two steps into near nothing: both hold too much. Every step may, also the first. A grid that does not end at 0 has no last step to except.
    steep = Schedule(torch.tensor([1.0, 0.5, 0.05, 0.004, 0.0]))
    assert "steps 1 to 2 are" in (left_out(steep, [True] * 4, Dance(0.5), None) or "")
    for sigmas, steps in (([0.5, 0.05, 0.004, 0.0], [0, 1]), ([1.0, 0.5, 0.004], [1]), (steep.sigmas.tolist(), [1, 2])):
        assert overfull(Dance(0.5), Schedule(torch.tensor(sigmas))) == steps


def test_a_kernel_knows_its_grid() -> None:
    grid = grid_of("Wan, DPM", 10, 8.0)
    assert KernelSpec(name="flow").build(grid) == Flow(0.5, first=float(grid.sigmas[0]))
    assert KernelSpec(name="linear").build(grid) == Linear(0.5, second=float(grid.sigmas[1]))
    assert KernelSpec(name="sage").build(grid) == Sage(0.5)
    for kind in (lambda: Flow(first=0.0), lambda: Linear(second=1.5), lambda: Flow(first=math.nan)):
        with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
            kind()


@pytest.mark.parametrize("asked", [None, True, False])
def test_steps_above_the_clamp_do_not_explore_and_are_told(asked: bool | None) -> None:
    """With shift 12 and 29 steps the first steps of sage lie above sigma_max: nothing is drawn there, so nobody parts there."""
    grid = Schedule.shifted(29, 12.0)
    assert swallowed(Sage(), grid) == [0]
    assert swallowed(SageExact(), grid) == []
    schedule = explore(grid, [True] * 29, Sage(), asked)
    assert schedule.exploring_range()[0] == 1
    finer = Schedule.shifted(80, 12.0)
    assert swallowed(Sage(), finer) == [0, 1]
    for one, said in (  # a window that begins later misses nothing
        (schedule, "swallows step 0"),
        (explore(grid, [index > 5 for index in range(29)], Sage(), asked), None),
        (explore(finer, [True] * 80, Sage(), asked), "swallows steps 0 to 1"),
        (explore(finer, [20 < index < 25 for index in range(80)], Sage(), asked), None),
    ):
        assert any((said or "swallows") in text for text in warnings(Sage(), one)) == (said is not None)
    assert explore(grid, [True] * 29, SageExact(), None).stochastic == (True,) * 29
