"""The short form of a forecast, for the start of a run."""

from __future__ import annotations

from sage_grpo.forecast import hardware, show
from sage_grpo.forecast.changes import way_to_fit
from sage_grpo.forecast.costs import forecast
from sage_grpo.training.config import TrainConfig


def opening(config: TrainConfig, processes: int) -> list[str]:
    """A few lines on passes, time and memory on this machine; none where a forecast cannot be made.

    A run does not need one: what is wrong with its model or its arithmetic is said by those who need them right.
    """
    try:
        found = forecast(config, hardware.here(processes), gpus=processes)
    except ValueError:
        return []
    return show.short(found, way_to_fit(found))
