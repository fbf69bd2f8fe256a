"""Numbers that need no network: the Gaussian recursion, telescoping variances, orders of convergence."""

from __future__ import annotations

import math

import pytest

from kernel_cases import COEFFICIENT_PRESERVING, final_variance, grid
from sage_grpo.flow.kernels import Cps, Dance, Flow, Kernel, Ode, Sage, SageExact

STEPS = (10, 20, 40, 80, 160, 320)
ON_MANIFOLD: dict[Kernel, tuple[float, ...]] = {  # data variance 1, shift 1
    Ode(): (0.773, 0.879, 0.938, 0.968, 0.984, 0.992),
    Flow(): (0.867, 0.940, 0.978, 0.995, 1.003, 1.006),
    Dance(): (0.811, 0.900, 0.949, 0.974, 0.987, 0.993),
    Sage(): (0.972, 0.989, 0.996, 0.997, 0.998, 1.000),
    Cps(): (0.677, 0.758, 0.802, 0.825, 0.837, 0.844),
    SageExact(): (0.757, 0.869, 0.932, 0.965, 0.983, 0.991),
}


def _name(kernel: Kernel) -> str:
    return type(kernel).__name__


@pytest.mark.parametrize("kernel", ON_MANIFOLD, ids=_name)
def test_final_variance_of_unit_gaussian_data(kernel: Kernel) -> None:
    found = [final_variance(kernel, grid(steps), 1.0) for steps in STEPS]
    assert found == pytest.approx(ON_MANIFOLD[kernel], abs=1e-3)


@pytest.mark.parametrize("kind", COEFFICIENT_PRESERVING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", STEPS)
def test_coefficient_preserving_kernels_leave_exactly_nothing(kind: type, steps: int) -> None:
    assert final_variance(kind(eta=0.5), grid(steps, 5.0), 0.0) == 0.0


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.3])
@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (10, 3.0), (20, 5.0), (50, 7.0), (29, 12.0), (333, 0.2)])
def test_sage_injects_the_same_total_variance_whatever_the_schedule(steps: int, shift: float, eta: float) -> None:
    sigmas = grid(steps, shift)
    total = float(Sage(eta=eta)(sigmas[:-1], sigmas[1:]).std.square().sum())
    assert total == pytest.approx(eta**2 * (math.log(1 / 0.003) - 0.997), rel=1e-9)
    assert total == pytest.approx(4.812 * eta**2, rel=1e-4)
    dance = float(Dance(eta=eta)(sigmas[:-1], sigmas[1:]).std.square().sum())
    assert dance == pytest.approx(eta**2, rel=1e-9)
