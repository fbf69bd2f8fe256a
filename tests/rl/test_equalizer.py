"""The equaliser flattens the gradient over steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import law
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
