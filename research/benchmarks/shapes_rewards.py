"""The rewards of experiments on the shapes world, as the suites in research/suites have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTING_B: Mapping[str, float] = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
"""The paper's alignment-focused reward; the judge's Overall is this sum, whatever a run is trained on."""
UNTRAINED: Mapping[str, Any] = {
    "name": "video_stats",
    "label": "untrained",
    "metric_only": True,
    "weights": {"flicker": 0.0, "sharpness": 0.0},
    "options": {"parts": ["flicker", "sharpness"]},  # the others estimate motion, which takes as long as the judge
    "batch_size": 0,
}
"""Metrics that nothing is trained on and the judge does not compute: unsteady light over time, and blur."""


def judged(weights: Mapping[str, float] = SETTING_B) -> list[Mapping[str, Any]]:
    """The judge with these weights, and the metrics that are only measured."""
    return [{"name": "shapes", "weights": dict(weights), "batch_size": 0}, UNTRAINED]


def proxied() -> list[Mapping[str, Any]]:
    """The naive proxy counts, the judge only watches."""
    watching = {"name": "shapes", "weights": dict(SETTING_B), "metric_only": True, "batch_size": 0}
    return [{"name": "shapes_proxy", "weights": {"proxy": 1.0}, "batch_size": 0}, watching, UNTRAINED]
