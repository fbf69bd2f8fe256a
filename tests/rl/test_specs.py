"""Parts of a configuration refuse values outside of their ranges when they are made, not when they are used."""

from __future__ import annotations

import pytest

from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.objective import ObjectiveSpec
from sage_grpo.training.config import SentinelConfig


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KlCoefficient, {"window": 0}),
        (ObjectiveSpec, {"levels": 0}),
        (SentinelConfig, {"window": 4}),
        (SentinelConfig, {"lr_factor": 1.0}),
    ],
)
def test_a_value_outside_of_its_range_is_refused(kind: type, options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**options)
