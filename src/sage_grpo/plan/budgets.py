"""Iteration time over memory: forecasts of a run with the memory budgets of common cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sage_grpo.plan.costs import Forecast, forecast
from sage_grpo.plan.formulas import GIB
from sage_grpo.types import Keep

SIZES = (16.0, 24.0, 40.0, 80.0, 140.0)
"""Budgets in GiB, from a small card to an H200."""


def over_memory(now: Forecast) -> list[Forecast]:
    """Forecasts with every size below the device's memory as `model.memory`, and with the whole device; empty if costs
    are not known, and on a CPU."""
    if now.network is None or now.hardware.is_cpu:
        return []
    budgets = [*(size for size in SIZES if size < now.hardware.gib), None]
    return [_with(now, budget) for budget in budgets]


def _with(now: Forecast, budget: float | None) -> Forecast:
    config = replace(now.config, model=replace(now.config.model, memory=budget))
    return forecast(
        config,
        now.hardware,
        gpus=now.layout.processes,
        architecture=now.architecture,
        held_out=now.held_out or None,
        like=now,
    )


def outcome(one: Forecast) -> str:
    """Text on a budget: the activations that blocks keep, or the reason why it is too small."""
    if one.fits:
        return counted(one.levels)
    worst = max(one.phases, key=lambda phase: phase.memory.total)
    return f"too little: {worst.name} needs {worst.memory.total / GIB:.1f}, {one.room / GIB:.1f} can be used"


def counted(levels: Sequence[Keep]) -> str:
    """Text with the number of blocks by kept activations."""
    return ", ".join(f"{level} {count}" for level, count in Counter(levels).items())
