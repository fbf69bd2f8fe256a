"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from sage_grpo.distributed.cluster import connected, find_ray
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.family import FamilyModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.workers.messages import RolloutTask, TaskResult, WorkerError, WorkerLost
from sage_grpo.workers.worker import Worker, device_name


def check(config: TrainConfig, processes: int, objects: Sequence[str] = ()) -> None:
    """Refuse configurations that workers do not support, before anything is loaded; `objects` are those that a program
    passes."""
    spec, reason = config.rollout.ray, ""
    if config.rollout.on != "ray":
        return
    if config.parallel.sp > 1:
        reason = (
            f"parallel.sp {config.parallel.sp}: the processes that share a clip would all let workers make it; set 1"
        )
    elif spec.address is None:
        reason = "without rollout.ray.address: a cluster that one of them started would end with it; start one (docs/guides/ray.md)"
    elif spec.workers < processes:
        reason = f"with rollout.ray.workers {spec.workers}: each has workers of its own; use {processes} or more"
    if reason and processes > 1:
        raise WorkerError(f"rollout.on ray does not work for {processes} training processes {reason}.")
    if objects:
        raise WorkerError(
            f"rollout.on ray: workers load what the configuration names, and cannot have the {objects[0]} that this program made. Name it by a path "
            "or an import path (module:Name), or use rollout.on here."
        )
    find_ray(spec.address)


def measured_attention(model: VelocityModel) -> tuple[str, str] | None:
    """The trainer's device and the attention that its model chose by itself, or None."""
    if not isinstance(model, FamilyModel) or model.spec.attention != "auto":
        return None
    return device_name(model.device), model.attention


class RayWorkerPool:
    """Up to `rollout.ray.workers` actors, or a rank's share of them. Ray starts each when resources are free."""

    def __init__(self, config: TrainConfig, engine: RolloutEngine, rank: int, ranks: int) -> None:
        spec, model = config.rollout.ray, engine.model
        self._open = ExitStack()
        versions = (config.rollout.staleness + 2) * sum(one.nbytes for one in model.trainable().values())
        self._ray = self._open.enter_context(connected(spec.address, spec.workers * spec.cpus, versions))
        gpus = float(model.device.type == "cuda") if spec.gpus is None else spec.gpus
        paths = [os.path.abspath(path) for path in sys.path]
        self._class = self._ray.remote(Worker).options(num_cpus=spec.cpus, num_gpus=gpus)
        self._arguments = config, ranks, torch.get_num_threads(), paths, measured_attention(model)
        self.names = [f"worker {number + 1}" for number in range(rank, spec.workers, ranks)]
        self._actors: dict[str, Any] = {}
        self._killed = False

    def start(self, name: str) -> Any:
        """A new worker of this name, once Ray has room for it."""
        if self._killed:
            raise WorkerLost(name)
        self._actors[name] = self._class.remote(*self._arguments)
        self._get(self._actors[name].ready.remote())
        return self._actors[name]

    def publish(self, weights: bytes) -> Any:
        """Weights for the tasks of a version; freed when no task refers to them."""
        return self._ray.put(weights)

    def run(self, worker: Any, task: RolloutTask, weights: Any) -> TaskResult:
        result: TaskResult = self._get(worker.run.remote(task, weights))
        return result

    def _get(self, call: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except errors.RayTaskError:  # raised by the worker
            raise
        except errors.RayError as error:  # the worker is gone, or its node with the result
            kind = WorkerError if "creation task" in str(error) else WorkerLost
            raise kind(str(error)) from error

    def kill(self) -> None:
        """Stop all workers; their calls raise."""
        self._killed = True
        for actor in self._actors.values():
            self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, which ends if this run started it."""
        self._open.close()
