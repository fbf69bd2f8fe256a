"""Laws that every kernel obeys on every schedule, and numbers that need no network: the Gaussian recursion, telescoping variances."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from kernel_cases import COEFFICIENT_PRESERVING, ITO, STOCHASTIC, final_variance, grid, grids, kernels, some
from sage_grpo.objectives.trust_region import closed_form_kl
from sage_grpo.samplers.kernels import KERNELS, Cps, Dance, Flow, Kernel, KernelSpec, Ode, Sage, SageExact

ETA_ZERO: list[Kernel] = [Ode(), *(kind(eta=0.0) for kind in STOCHASTIC)]
STEPS = (10, 40, 320)
ON_MANIFOLD: dict[Kernel, tuple[float, ...]] = {  # data variance 1, shift 1
    Ode(): (0.773, 0.938, 0.992),
    Flow(): (0.867, 0.978, 1.006),
    Dance(): (0.811, 0.949, 0.993),
    Sage(): (0.972, 0.996, 1.000),
    Cps(): (0.677, 0.802, 0.844),
    SageExact(): (0.757, 0.932, 0.991),
}


@some
@given(kernel=kernels(), sigmas=grids())
def test_every_coefficient_is_finite_and_std_is_not_negative(kernel: Kernel, sigmas: Tensor) -> None:
    step = kernel(sigmas[:-1], sigmas[1:])
    for value in (step.a, step.b, step.std):
        assert torch.isfinite(value).all()
        assert value.shape == (len(sigmas) - 1,)
        assert value.dtype == torch.float32
    assert (step.std >= 0).all()


@some
@given(kernel=kernels(COEFFICIENT_PRESERVING), sigmas=grids())
def test_coefficient_preserving_kernels_keep_the_mixture(kernel: Kernel, sigmas: Tensor) -> None:
    p, q = sigmas[:-1].double(), sigmas[1:].double()
    for exact, tolerance in ((kernel(p, q), 1e-12), (kernel(p.float(), q.float()), 1e-6)):
        a, b, std = exact.a.double(), exact.b.double(), exact.std.double()
        signal = a * (1 - p) - b  # of x0 in x_next, when x = (1 - p) x0 + p eps and v = eps - x0
        noise = (a * p + b).square() + std.square()
        torch.testing.assert_close(signal, 1 - q, rtol=0, atol=tolerance)
        torch.testing.assert_close(noise, q.square(), rtol=0, atol=2 * tolerance)


@some
@given(kernel=kernels(ITO, least_eta=0.05), sigmas=grids())
def test_ito_kernels_correct_the_drift_by_half_the_variance_times_the_score(kernel: Kernel, sigmas: Tensor) -> None:
    p, q = sigmas[:-1].double(), sigmas[1:].double()
    step = kernel(p, q)
    x, v = 0.7, -1.3
    score = -(x + (1 - p) * v) / p
    expected = x + (q - p) * v + 0.5 * step.std.square() * score
    torch.testing.assert_close(step.a * x + step.b * v, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ETA_ZERO, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (50, 12.0), (1000, 20.0)])
def test_without_exploration_every_kernel_is_the_euler_step_bit_for_bit(
    kernel: Kernel, steps: int, shift: float
) -> None:
    sigmas = grid(steps, shift).float()
    step = kernel(sigmas[:-1], sigmas[1:])
    dt = (sigmas[1:].double() - sigmas[:-1].double()).float()
    assert torch.equal(step.a, torch.ones_like(dt))
    assert torch.equal(step.b, dt)
    assert torch.equal(step.std, torch.zeros_like(dt))
    x, v = torch.randn(steps, 5), torch.randn(steps, 5)
    assert torch.equal(step(x, v).sample(torch.randn(steps, 5)), x + dt[:, None] * v)


@pytest.mark.parametrize("kernel", [Ode(), *(kind(eta=0.6) for kind in STOCHASTIC)], ids=repr)
def test_all_steps_at_once_equal_one_step_at_a_time(kernel: Kernel) -> None:
    sigmas = grid(9, 5.0).float()
    whole = kernel(sigmas[:-1], sigmas[1:])
    for index, (p, q) in enumerate(pairwise(sigmas)):
        for one in (kernel(p, q), kernel(float(p), float(q))):
            for value, row in ((one.a, whole.a), (one.b, whole.b), (one.std, whole.std)):
                assert value.ndim == 0
                assert torch.equal(value, row[index])


@some
@given(kernel=kernels(STOCHASTIC, least_eta=0.1), sigmas=grids(max_steps=100), seed=st.integers(0, 99))
def test_three_ways_to_the_same_kl(kernel: Kernel, sigmas: Tensor, seed: int) -> None:
    whole = kernel(sigmas[:-1], sigmas[1:])
    usable = whole.std > 1e-2
    if not usable.any():
        return
    index = int(usable.nonzero()[seed % int(usable.sum()), 0])
    step = kernel(sigmas[index], sigmas[index + 1])
    torch.manual_seed(seed)
    x, v = torch.randn(3, 2, 7), torch.randn(3, 2, 7)
    v_ref = v + 0.1 * torch.randn(3, 2, 7)
    from_velocities = closed_form_kl(v, v_ref, step.sensitivity)
    from_means = step(x, v).kl(step(x, v_ref))
    by_hand = 0.5 * step.sensitivity**2 * (v - v_ref).square().mean((1, 2))
    mean, mean_ref = (step.a.double() * x + step.b.double() * u for u in (v, v_ref))
    std = step.std.double()
    reference = kl_divergence(Normal(mean, std), Normal(mean_ref, std)).mean((1, 2)).float()
    scale = float(step.std) ** -2 * 1e-5
    torch.testing.assert_close(from_velocities, by_hand, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(from_velocities, reference, rtol=1e-3, atol=scale * 1e-2)
    torch.testing.assert_close(from_velocities, from_means, rtol=1e-3, atol=scale)


def test_sage_integrates_the_diffusion_of_flow_exactly() -> None:
    p, q, parts = 0.95, 0.6, 20000
    nodes = torch.linspace(p, q, parts + 1, dtype=torch.float64)
    middle = (nodes[1:] + nodes[:-1]) / 2
    integral = float((0.5**2 * middle / (1 - middle)).sum()) * (p - q) / parts
    assert float(Sage(eta=0.5)(torch.tensor(p).double(), q).std ** 2) == pytest.approx(integral, rel=1e-6)


def test_sage_exact_renews_all_noise_at_sigma_one_and_its_clamp_does_not() -> None:
    free, clamped = SageExact(eta=0.5)(1.0, 0.9), SageExact(eta=0.5, sigma_max=0.997)(1.0, 0.9)
    assert float(free.std) == pytest.approx(0.9)
    assert 0 < float(clamped.std) < 0.9
    inside = SageExact(eta=0.5, sigma_max=0.9)(1.0, 0.95)
    assert float(inside.std) == 0.0
    assert float(inside.a) == 1.0


@pytest.mark.parametrize("kind", KERNELS.values(), ids=lambda kind: kind.__name__)
def test_a_step_must_go_down_inside_the_unit_interval_and_eta_be_finite(kind: type) -> None:
    for sigma, sigma_next in ((0.5, 0.6), (0.5, 0.5), (1.2, 0.5), (0.5, -0.1), (math.nan, 0.1)):
        with pytest.raises(ValueError, match="1 >= sigma > sigma_next >= 0"):
            kind()(sigma, sigma_next)
    with pytest.raises(ValueError, match=r"sigma = 0\.3 and sigma_next = 0\.4"):
        kind()(torch.tensor([1.0, 0.3]), torch.tensor([0.3, 0.4]))
    for eta in (-0.1, math.nan, math.inf) if kind is not Ode else ():
        with pytest.raises(ValueError, match=r"eta must be (at least 0|in \[0, 1\]), got"):
            kind(eta=eta)


def test_a_spec_builds_its_kernel_and_refuses_or_doubts_what_that_has_no_use_for() -> None:
    assert KernelSpec(name="sage_exact", eta=0.3, sigma_max=0.99).build() == SageExact(eta=0.3, sigma_max=0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, eta in (("cps", 1.0), ("sage", 1.5), ("ode", 3.0), ("flow", 0.0)):
            assert KernelSpec(name=name, eta=eta).build() == KERNELS[name](**({} if name == "ode" else {"eta": eta}))
    with pytest.raises(ValueError, match="Did you mean 'dance'"):
        KernelSpec(name="dnace")
    with pytest.raises(ValueError, match="sigma_max applies to sage and sage_exact, not to flow"):
        KernelSpec(name="flow", sigma_max=0.9).build()
    with pytest.raises(ValueError, match="eta must be"):
        KernelSpec(name="sage", eta=-0.1)
    with pytest.warns(UserWarning, match=r"kernel\.eta is 1\.6"):
        KernelSpec(name="sage", eta=1.6)


def test_x_and_v_have_one_shape_and_the_step_computes_in_the_precision_of_its_ends() -> None:
    """In float32 at least, whatever x has; one end in double is enough for double."""
    step = Sage()(0.9, 0.8)
    with pytest.raises(ValueError, match="a velocity has its x's shape"):
        step(torch.zeros(2, 3), torch.zeros(3))
    half = torch.randn(2, 3).to(torch.bfloat16)
    assert step(half, half).mean.dtype == torch.float32
    ends, doubles = (torch.tensor(0.8), torch.tensor(0.5)), (torch.tensor(0.8).double(), torch.tensor(0.5).double())
    for one in (Sage()(doubles[0], ends[1]), Sage()(ends[0], doubles[1])):
        assert {value.dtype for value in (one.a, one.b, one.std)} == {torch.float64}


@pytest.mark.parametrize("kernel", ON_MANIFOLD, ids=repr)
def test_final_variance_of_unit_gaussian_data(kernel: Kernel) -> None:
    """Kernels that keep the mixture leave nothing at all of points."""
    found = [final_variance(kernel, grid(steps), 1.0) for steps in STEPS]
    assert found == pytest.approx(ON_MANIFOLD[kernel], abs=1e-3)
    if isinstance(kernel, COEFFICIENT_PRESERVING):
        assert [final_variance(kernel, grid(steps, 5.0), 0.0) for steps in STEPS] == [0.0] * 3


@pytest.mark.parametrize("eta", [0.1, 1.3])
@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (29, 12.0), (333, 0.2)])
def test_sage_injects_the_same_total_variance_whatever_the_schedule(steps: int, shift: float, eta: float) -> None:
    sigmas = grid(steps, shift)
    total = float(Sage(eta=eta)(sigmas[:-1], sigmas[1:]).std.square().sum())
    assert total == pytest.approx(eta**2 * (math.log(1 / 0.003) - 0.997), rel=1e-9)
    dance = float(Dance(eta=eta)(sigmas[:-1], sigmas[1:]).std.square().sum())
    assert dance == pytest.approx(eta**2, rel=1e-9)
