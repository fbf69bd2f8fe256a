"""The equaliser flattens the gradient over steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import STOCHASTIC, grid, law
from sage_grpo.flow.kernels import Sage
from sage_grpo.rl.equalizer import equalizing_weights


@law
@given(values=st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=50))
def test_weights_times_sensitivity_is_the_median_everywhere(values: list[float]) -> None:
    sensitivity = torch.tensor(values, dtype=torch.float64)
    weights = equalizing_weights(sensitivity).double()
    middle = sorted(values)
    half = len(middle) // 2
    median = middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2
    torch.testing.assert_close(weights * sensitivity, torch.full_like(weights, median), rtol=1e-5, atol=1e-12)


@law
@given(factor=st.floats(0.01, 100.0))
def test_the_unit_of_the_sensitivity_cancels(factor: float) -> None:
    sensitivity = torch.tensor([0.2, 1.0, 5.0, 7.0])
    torch.testing.assert_close(equalizing_weights(factor * sensitivity), equalizing_weights(sensitivity))


@pytest.mark.parametrize("kind", STOCHASTIC, ids=lambda kind: kind.__name__)
def test_measured_gradients_are_equal_after_weighting(kind: type) -> None:
    torch.manual_seed(0)
    sigmas = grid(12, 5.0).float()[:-1]  # the last step of the coefficient-preserving kernels has no noise
    step = kind(eta=0.5)(sigmas[:-1], sigmas[1:])
    v = torch.randn(len(sigmas) - 1, 4096, requires_grad=True)
    gaussian = step(torch.randn_like(v), v)
    x_next = gaussian.sample(torch.randn_like(v)).detach()
    weights = equalizing_weights(step.sensitivity)
    (raw,) = torch.autograd.grad(gaussian.log_prob(x_next).sum(), v, retain_graph=True)
    (flat,) = torch.autograd.grad((weights * gaussian.log_prob(x_next)).sum(), v)
    raw_norm, flat_norm = raw.norm(dim=1), flat.norm(dim=1)
    assert float(raw_norm.max() / raw_norm.min()) > 3
    assert float(flat_norm.max() / flat_norm.min()) < 1.15


def test_the_papers_setting_spans_148_times() -> None:
    sigmas = grid(20, 5.0)
    weights = equalizing_weights(Sage(eta=0.5)(sigmas[:-1], sigmas[1:]).sensitivity)
    assert float(weights.max() / weights.min()) == pytest.approx(148, abs=1)


def test_a_cap_bounds_the_large_weights_and_leaves_the_others() -> None:
    sensitivity = torch.tensor([0.01, 1.0, 2.0])
    assert equalizing_weights(sensitivity, cap=3.0).tolist() == pytest.approx([3.0, 1.0, 0.5])
    with pytest.raises(ValueError, match="cap must be positive"):
        equalizing_weights(sensitivity, cap=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "non-empty row of trained steps"),
        ([[1.0]], "non-empty row of trained steps"),
        ([1.0, math.inf], "deterministic and must not be trained"),
        ([1.0, 0.0], "finite and positive"),
        ([1.0, math.nan], "finite and positive"),
    ],
)
def test_steps_that_cannot_be_trained_are_refused(values: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equalizing_weights(torch.tensor(values))


def test_a_cap_may_be_below_one() -> None:
    assert equalizing_weights(torch.tensor([1.0, 2.0, 4.0]), cap=0.5).tolist() == [0.5, 0.5, 0.5]
