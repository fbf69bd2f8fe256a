"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch

from sage_grpo.distributed.cluster import connected, find_ray
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.family import FamilyModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.workers.messages import Outcome, RolloutTask, WorkerError
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
        self._numbers = count(rank + 1, ranks)
        self._actors: dict[str, Any] = {}
        self._ready: list[str] = []
        self._starting: dict[Any, str] = {}
        self._running: dict[Any, str] = {}
        self._weights: dict[int, Any] = {}
        self._reason = ""
        for _ in range(rank, spec.workers, ranks):
            self._start_worker()

    def _start_worker(self) -> None:
        name = f"worker {next(self._numbers)}"
        self._actors[name] = self._class.remote(*self._arguments)
        self._starting[self._actors[name].ready.remote()] = name

    def ready(self) -> Sequence[str]:
        return list(self._ready)

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """Publish weights for tasks with this version; versions before the `oldest` are no longer needed."""
        self._weights = {number: one for number, one in self._weights.items() if number >= oldest}
        self._weights[version] = self._ray.put(weights)

    def start(self, worker: str, task: RolloutTask) -> None:
        self._running[self._actors[worker].run.remote(task, self._weights[task.version])] = worker

    def wait(self, seconds: float) -> Sequence[Outcome]:
        """Outcomes of tasks since the last call; waits up to `seconds` for the first. Also registers new workers."""
        waiting = [*self._running, *self._starting]
        if not waiting:
            return []
        outcomes = []
        for call in self._ray.wait(waiting, num_returns=1, timeout=seconds)[0]:
            worker = self._running.pop(call, None) or self._starting.pop(call)
            outcome = self._outcome(call, worker)
            if isinstance(outcome, Outcome):
                outcomes.append(outcome)
            elif worker in self._actors:  # else it was dismissed meanwhile
                self._ready.append(worker)
        return outcomes

    def _outcome(self, call: Any, worker: str) -> Outcome | str:
        """Outcome of a task, or the device of a worker that has started."""
        errors = self._ray.exceptions
        try:
            result = self._ray.get(call)
        except errors.RayTaskError as error:  # raised by the worker
            return Outcome(worker, error=str(error))
        except errors.RayError as error:  # the worker is gone, or its node with the result
            if worker in self._actors:
                self.dismiss(worker)
                if "creation task" in str(error):
                    self._reason = f"{worker} could not start: {error}"
                    warnings.warn(self._reason, stacklevel=2)
                else:
                    self._start_worker()
            return Outcome(worker, error=str(error), lost=True)
        return result if isinstance(result, str) else Outcome(worker, result=result)

    def dismiss(self, worker: str) -> None:
        """Remove a worker without a replacement."""
        if worker in self._ready:
            self._ready.remove(worker)
        self._ray.kill(self._actors.pop(worker))
        self._reason = self._reason or "all were refused"

    def exhausted_reason(self) -> str:
        """The reason why no worker can join, or an empty string."""
        return "" if self._actors else self._reason

    def close(self) -> None:
        """Stop all workers, and the cluster if this run started it."""
        for worker in list(self._actors):
            self.dismiss(worker)
        self._open.close()
