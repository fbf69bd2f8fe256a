"""Forecast of an iteration with workers on Ray: tasks, traffic, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sage_grpo.plan.architecture import latent_elements
from sage_grpo.plan.costs import Forecast
from sage_grpo.plan.formulas import GIB, trainable
from sage_grpo.training.loss import needs_velocity_old


@dataclass(frozen=True)
class WorkerCosts:
    """An iteration with workers."""

    workers: int
    tasks: int
    """Parts of an iteration that workers take one at a time."""
    rounds: int
    """Tasks of the busiest worker."""
    sampling_seconds: float
    """Time until the last task is done."""
    updating_seconds: float
    """Time of the trainer."""
    iteration_seconds: float
    """Sum of both, or their maximum with rollout.staleness."""
    weights_megabytes: float
    """Size of the adapter, sent to every node once an iteration."""
    task_megabytes: float
    """Size of the largest task's records, sent to the trainer."""
    gib: float
    """Memory of a worker at its peak."""
    room: float
    """Memory that it can use."""

    @property
    def bottleneck(self) -> str:
        """The slower side, and a remedy."""
        if self.gib > self.room:
            return f"a worker does not fit: it needs {self.gib:.1f} GiB of {self.room:.0f} that can be used"
        if self.tasks < self.workers:
            return f"{self.workers - self.tasks} of {self.workers} workers have nothing to do: use more prompts, or a smaller batch.micro_batch"
        if self.sampling_seconds > self.updating_seconds:
            return "workers: more of them shorten an iteration"
        return "the trainer's updates: more workers do not help"


def crew_of(trainer: Forecast, worker: Forecast) -> WorkerCosts | None:
    """Forecast an iteration with workers on the hardware of `worker`; None if the run has none, or costs are not
    known."""
    config, plan = trainer.config, trainer.plan
    if config.rollout.on != "ray" or not trainer.phases or trainer.network is None:
        return None
    tasks, workers, ranks = plan.tasks(), config.rollout.ray.workers, range(len(plan.shares))
    rounds = math.ceil(len(tasks) / max(1, workers // len(ranks)))  # every training process has its own workers
    theirs = ("rollout", "decode", "reward") if config.rollout.ray.scores == "workers" else ("rollout",)
    sampling = sum(phase.seconds for phase in worker.phases if phase.name in theirs) * rounds / len(tasks)
    updating = sum(phase.seconds for phase in trainer.phases if phase.name not in theirs)
    size = latent_elements(trainer.architecture) * (2 if config.rollout.storage == "bfloat16" else 4)
    velocities = needs_velocity_old(config.build_objective(), config.trust_region)
    kept = [{one for update in range(plan.updates) for one in task.replayable(0, update)} for task in tasks]
    rows = [sum(one.rows * (1 + velocities) + len(one.members) for one in replays) for replays in kept]
    return WorkerCosts(
        workers=workers,
        tasks=sum(len(plan.tasks(rank)) for rank in ranks),
        rounds=rounds,
        sampling_seconds=sampling,
        updating_seconds=updating,
        iteration_seconds=max(sampling, updating) if config.rollout.staleness else sampling + updating,
        weights_megabytes=4e-6 * trainable(trainer.network, trainer.job),
        task_megabytes=1e-6 * size * max(rows),
        gib=max(phase.memory.total for phase in worker.phases if phase.name in theirs) / GIB,
        room=worker.room / GIB,
    )
