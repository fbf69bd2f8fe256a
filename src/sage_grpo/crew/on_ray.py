"""Workers as actors of a Ray cluster. Ray is imported here alone, and only where it was asked for."""

from __future__ import annotations

import math
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import nn

from sage_grpo.crew.foreman import Foreman, Lagging, Told
from sage_grpo.crew.jobs import CrewError, Job
from sage_grpo.crew.studio import Studio
from sage_grpo.crew.worker import Worker
from sage_grpo.parallel.spec import RaySpec
from sage_grpo.training.config import TrainConfig

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, Ray's own servers listen on the loopback address: on Linux they would listen on all of them, whatever address is asked for."""
STORE = 256 * 2**20
"""Bytes of shared memory for what travels in a cluster of our own; what does not fit goes to disk."""


def find_ray(address: str | None) -> Any:
    """The package, or what to do without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault(LOOPBACK, "0")  # read when Ray is imported
    try:
        import ray
    except ImportError as error:
        raise CrewError('rollout.on ray needs Ray: pip install "sage-grpo[ray]".') from error
    return ray


def connect(spec: RaySpec) -> Any:
    """Ray, connected to the cluster of `address`, or to one that is started for this process."""
    ray = find_ray(spec.address)
    if ray.is_initialized():
        return ray
    if spec.address is not None:
        try:
            _begin(ray, address=spec.address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise CrewError(
                f"No Ray cluster answers at rollout.ray.address {spec.address}: {error}. Start one (docs/guides/ray.md), or leave the address out."
            ) from error
        return ray
    cpus = max(os.cpu_count() or 1, math.ceil(spec.workers * spec.cpus))
    _begin(ray, address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=STORE)
    where = {node["NodeManagerAddress"] for node in ray.nodes()}
    if where != {"127.0.0.1"}:
        ray.shutdown()
        raise CrewError(
            f"Ray listens on {', '.join(sorted(where))}, where others could run code on this machine, because it was imported before the run began. "
            f"Set {LOOPBACK}=0 in the environment, or rollout.ray.address to a cluster of your own."
        )
    return ray


def _begin(ray: Any, **options: Any) -> None:
    """Begin quietly, and leave a run its own way to stop, which Ray would replace."""
    stops = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="ERROR", **options)
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, stops)


def crew_of(
    config: TrainConfig, studio: Studio, params: Mapping[str, nn.Parameter], clip: float
) -> Foreman | Lagging | None:
    """Who makes a trainer's rollouts in its place; None is nobody. `clip` is the clip range."""
    rollout = config.rollout
    if rollout.on == "here":
        return Lagging(studio, params) if rollout.staleness else None
    check(config, studio.world.processes)
    return Foreman(studio, params, RayHands(config, studio.model.device), rollout.ray, clip, rollout.staleness)


def check(config: TrainConfig, processes: int, given: Sequence[str] = ()) -> None:
    """Refuse what workers cannot do, before anything is loaded; `given` names what a program hands over as objects."""
    if config.rollout.on != "ray":
        return
    if processes > 1:
        raise CrewError(
            f"rollout.on ray works for one training process, and there are {processes}: leave torchrun out, and let workers have the other GPUs."
        )
    if given:
        raise CrewError(
            f"rollout.on ray: workers load what the configuration names, and cannot have the {given[0]} that this program made. Name it by a path "
            "or an import path (module:Name), or use rollout.on here."
        )
    find_ray(config.rollout.ray.address)


class RayHands:
    """Up to `rollout.ray.workers` actors. Ray starts each where there is room for it, now or later."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """device: where the trainer computes."""
        spec = config.rollout.ray
        self._ours = not find_ray(spec.address).is_initialized()
        self._ray = connect(spec)
        gpus = float(device.type == "cuda") if spec.gpus is None else spec.gpus
        paths = [os.path.abspath(path) for path in sys.path]
        self._actor = self._ray.remote(Worker).options(num_cpus=spec.cpus, num_gpus=gpus)
        self._given = config, torch.get_num_threads(), paths
        self._actors: dict[str, Any] = {}
        self._ready: dict[str, str] = {}
        """Of those who are there, what they compute on."""
        self._coming: dict[Any, str] = {}
        self._running: dict[Any, str] = {}
        self._weights: dict[int, Any] = {}
        self._why, self._made = "", 0
        for _ in range(spec.workers):
            self._hire()

    def _hire(self) -> None:
        self._made += 1
        name = f"worker {self._made}"
        self._actors[name] = self._actor.remote(*self._given)
        self._coming[self._actors[name].ready.remote()] = name

    def ready(self) -> Sequence[str]:
        """Those who can work, also those who do."""
        return list(self._ready)

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """New weights, once for the cluster; jobs that wait may still name older ones."""
        self._weights = {number: one for number, one in self._weights.items() if number >= oldest}
        self._weights[version] = self._ray.put(weights)

    def start(self, worker: str, job: Job) -> None:
        """Give a worker a job."""
        self._running[self._actors[worker].make.remote(job, self._weights[job.version])] = worker

    def wait(self, seconds: float) -> Sequence[Told]:
        """What became of jobs, and who has come."""
        waiting = [*self._running, *self._coming]
        if not waiting:
            return []
        done, _ = self._ray.wait(waiting, num_returns=1, timeout=seconds)
        told = []
        for one in done:
            worker = self._running.pop(one, None) or self._coming.pop(one)
            found = self._became(one, worker)
            if isinstance(found, Told):
                told.append(found)
            elif worker in self._actors:  # else it was refused meanwhile
                self._ready[worker] = found
        return told

    def _became(self, one: Any, worker: str) -> Told | str:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(one)
        except errors.RayTaskError as error:  # what the worker raised
            return Told(worker, error=str(error))
        except errors.RayError as error:  # it is gone, or its node with what it made
            if worker in self._actors:
                self.dismiss(worker)
                if "creation task" in str(error):
                    self._why = f"{worker} could not start: {error}"
                    warnings.warn(self._why, stacklevel=2)
                else:
                    self._hire()
            return Told(worker, error=str(error), lost=True)
        return found if isinstance(found, str) else Told(worker, result=found)

    def dismiss(self, worker: str) -> None:
        """Send a worker away; nobody comes in its place."""
        self._ready.pop(worker, None)
        self._ray.kill(self._actors.pop(worker))
        self._why = self._why or "all were refused"

    def hope(self) -> str:
        """Empty while more workers may come, else why none will."""
        return "" if self._actors else self._why

    def close(self) -> None:
        """Send all away, and end the cluster if it is ours."""
        for worker in list(self._actors):
            self.dismiss(worker)
        if self._ours:
            self._ours = False
            self._ray.shutdown()
