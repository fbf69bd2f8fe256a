"""The equaliser flattens the gradient over steps."""

from __future__ import annotations

import math

import pytest
import torch

from sage_grpo.rl.equalizer import equalizing_weights


@pytest.mark.parametrize(
    ("values", "cap", "weights"),
    [
        ([4.0], None, [1.0]),
        ([1.0, 4.0], None, [2.5, 0.625]),
        ([8.0, 0.5, 2.0], None, [0.25, 4.0, 1.0]),
        ([8.0, 0.5, 2.0], 3.0, [0.25, 3.0, 1.0]),
        ([1.0, 2.0, 4.0, 16.0], None, [3.0, 1.5, 0.75, 0.1875]),
    ],
)
def test_weights_times_sensitivity_is_the_median_everywhere(values: list, cap: float | None, weights: list) -> None:
    """But for a cap, which bounds the large weights and leaves the others."""
    found = equalizing_weights(torch.tensor(values), cap=cap)
    assert found.dtype == torch.float32
    assert found.tolist() == weights


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "non-empty row of trained steps"),
        ([[1.0]], "non-empty row of trained steps"),
        ([1.0, math.inf], "deterministic and must not be trained"),
        ([1.0, 0.0], "finite and positive"),
    ],
)
def test_steps_that_cannot_be_trained_are_refused(values: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equalizing_weights(torch.tensor(values))
    with pytest.raises(ValueError, match="cap must be positive"):
        equalizing_weights(torch.ones(2), cap=0.0)
