"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import nn

from sage_grpo.distributed.cluster import connected, find_ray
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.family import FamilyModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.reference import PastWeights
from sage_grpo.workers.dispatcher import Dispatcher
from sage_grpo.workers.messages import RolloutTask, WorkerError
from sage_grpo.workers.pool import JobResult
from sage_grpo.workers.stale_rollouts import StaleRollouts
from sage_grpo.workers.worker import Worker, title


def crew_of(
    config: TrainConfig,
    studio: RolloutEngine,
    params: Mapping[str, nn.Parameter],
    past: PastWeights | None,
    clip: float,
) -> Dispatcher | StaleRollouts | None:
    """The workers of a trainer; None if it samples itself. `past` are old weights, if they sample; `clip` is the clip
    range."""
    rollout, world = config.rollout, studio.world
    if rollout.on == "here":
        return None if past is None else StaleRollouts(studio, past)
    check(config, world.processes)
    if world.size > 1 and studio.model.others:
        raise WorkerError(
            f"rollout.on ray with {world.size} training processes needs a model with one network, and this one has {1 + len(studio.model.others)}: the "
            "processes that share them would not check their workers on the same one. Use one training process."
        )
    hands = RayWorkerPool(config, studio, world.rank, world.size)
    return Dispatcher(studio, params, hands, rollout.ray, clip, past)


def check(config: TrainConfig, processes: int, given: Sequence[str] = ()) -> None:
    """Refuse configurations that workers do not support, before anything is loaded; `given` names the objects that a
    program passes."""
    spec = config.rollout.ray
    if config.rollout.on != "ray":
        return
    wrong = {
        f"parallel.sp {config.parallel.sp}: the processes that share a clip would all let workers make it; set 1": config.parallel.sp
        > 1,
        "without rollout.ray.address: a cluster that one of them started would end with it; start one (docs/guides/ray.md)": spec.address
        is None,
        f"with rollout.ray.workers {spec.workers}: each has workers of its own; use {processes} or more": spec.workers
        < processes,
    }
    for reason, found in wrong.items() if processes > 1 else ():
        if found:
            raise WorkerError(f"rollout.on ray does not work for {processes} training processes {reason}.")
    if given:
        raise WorkerError(
            f"rollout.on ray: workers load what the configuration names, and cannot have the {given[0]} that this program made. Name it by a path "
            "or an import path (module:Name), or use rollout.on here."
        )
    find_ray(spec.address)


def chosen_by(model: VelocityModel) -> tuple[str, str] | None:
    """The trainer's device and the attention that its model chose by itself, or None."""
    if not isinstance(model, FamilyModel) or model.spec.attention != "auto":
        return None
    return title(model.device), model.attention


class RayWorkerPool:
    """Up to `rollout.ray.workers` actors, or a rank's share of them. Ray starts each when resources are free."""

    def __init__(self, config: TrainConfig, studio: RolloutEngine, rank: int = 0, ranks: int = 1) -> None:
        """studio: the trainer's."""
        spec, device = config.rollout.ray, studio.model.device
        self._open = ExitStack()
        versions = (config.rollout.staleness + 2) * sum(one.nbytes for one in studio.model.trainable().values())
        self._ray = self._open.enter_context(connected(spec.address, config.actor_cpus, versions))
        gpus = float(device.type == "cuda") if spec.gpus is None else spec.gpus
        paths = [os.path.abspath(path) for path in sys.path]
        self._actor = self._ray.remote(Worker).options(num_cpus=spec.cpus, num_gpus=gpus)
        self._given = config, ranks, torch.get_num_threads(), paths, studio.reward.away, chosen_by(studio.model)
        self._numbers = count(rank + 1, ranks)
        self._actors: dict[str, Any] = {}
        self._ready: dict[str, str] = {}
        """Device of every ready worker."""
        self._coming: dict[Any, str] = {}
        self._running: dict[Any, str] = {}
        self._weights: dict[int, Any] = {}
        self._why = ""
        for _ in range(rank, spec.workers, ranks):
            self._hire()

    def _hire(self) -> None:
        name = f"worker {next(self._numbers)}"
        self._actors[name] = self._actor.remote(*self._given)
        self._coming[self._actors[name].ready.remote()] = name

    def ready(self) -> Sequence[str]:
        """Workers that are ready or busy."""
        return list(self._ready)

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """Publish new weights once for the cluster; waiting jobs may still name older ones."""
        self._weights = {number: one for number, one in self._weights.items() if number >= oldest}
        self._weights[version] = self._ray.put(weights)

    def start(self, worker: str, job: RolloutTask) -> None:
        """Start a job on a worker."""
        self._running[self._actors[worker].make.remote(job, self._weights[job.version])] = worker

    def wait(self, seconds: float) -> Sequence[JobResult]:
        """Outcomes of jobs; also registers new workers."""
        waiting = [*self._running, *self._coming]
        if not waiting:
            return []
        done, _ = self._ray.wait(waiting, num_returns=1, timeout=seconds)
        told = []
        for one in done:
            worker = self._running.pop(one, None) or self._coming.pop(one)
            found = self._became(one, worker)
            if isinstance(found, JobResult):
                told.append(found)
            elif worker in self._actors:  # else it was dismissed meanwhile
                self._ready[worker] = found
        return told

    def _became(self, one: Any, worker: str) -> JobResult | str:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(one)
        except errors.RayTaskError as error:  # raised by the worker
            return JobResult(worker, error=str(error))
        except errors.RayError as error:  # the worker is gone, or its node with the result
            if worker in self._actors:
                self.dismiss(worker)
                if "creation task" in str(error):
                    self._why = f"{worker} could not start: {error}"
                    warnings.warn(self._why, stacklevel=2)
                else:
                    self._hire()
            return JobResult(worker, error=str(error), lost=True)
        return found if isinstance(found, str) else JobResult(worker, result=found)

    def dismiss(self, worker: str) -> None:
        """Remove a worker without a replacement."""
        self._ready.pop(worker, None)
        self._ray.kill(self._actors.pop(worker))
        self._why = self._why or "all were refused"

    def hope(self) -> str:
        """The reason why no worker can join, or an empty string."""
        return "" if self._actors else self._why

    def close(self) -> None:
        """Stop all workers, and the cluster if this run started it."""
        for worker in list(self._actors):
            self.dismiss(worker)
        self._open.close()
