"""Forecast of an iteration with workers on Ray: tasks, seconds and the bottleneck."""

from __future__ import annotations

import math
from typing import Any

from sage_grpo.plan.costs import Forecast
from sage_grpo.plan.formulas import GIB


def worker_costs(trainer: Forecast, worker: Forecast) -> dict[str, Any] | None:
    """An iteration with workers on the hardware of `worker`; None if the run has none. `tasks` are the parts of an
    iteration that workers take one at a time, `rounds` those of the busiest."""
    config, plan = trainer.config, trainer.plan
    if config.rollout.on != "ray":
        return None
    own, workers, ranks = len(plan.tasks()), config.rollout.ray.workers, range(len(plan.shares))
    rounds = math.ceil(own / max(1, workers // len(ranks)))  # every training process has its own workers
    theirs = ("rollout", "decode", "reward") if config.rollout.ray.scores == "workers" else ("rollout",)
    phases = [phase for phase in worker.phases if phase.name in theirs]
    sampling = sum(phase.seconds for phase in phases) * rounds / own
    updating = sum(phase.seconds for phase in trainer.phases if phase.name not in theirs)
    tasks, gib = sum(len(plan.tasks(rank)) for rank in ranks), max(phase.memory.total for phase in phases) / GIB
    return {
        "workers": workers,
        "tasks": tasks,
        "rounds": rounds,
        "sampling_seconds": sampling,
        "updating_seconds": updating,
        "iteration_seconds": max(sampling, updating) if config.rollout.staleness else sampling + updating,
        "gib": gib,
        "bottleneck": _bottleneck(workers - tasks, sampling > updating, gib, worker.room / GIB),
    }


def _bottleneck(idle: int, sampling: bool, gib: float, room: float) -> str:
    """The slower side, and a remedy."""
    if gib > room:
        return f"a worker does not fit: it needs {gib:.1f} GiB of {room:.0f} that can be used"
    if idle > 0:
        return f"tasks: {idle} workers have nothing to do; use more prompts, or a smaller batch.micro_batch"
    return (
        "workers: more of them shorten an iteration" if sampling else "the trainer's updates: more workers do not help"
    )
