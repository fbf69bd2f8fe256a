"""Workers, and pools of them as actors of a Ray cluster: an existing one, or one that is started here and that no other machine can reach.

Ray is imported only here, and only on request.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any

import torch

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.devices import choose_device
from sage_grpo.models.family import FamilyModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.inputs import load_model, load_rewards
from sage_grpo.training.offload import get_ready, hold_to_budget, settle
from sage_grpo.training.scoring import black_clips
from sage_grpo.workers.messages import (
    RolloutTask,
    SavedRecord,
    TaskResult,
    WorkerError,
    WorkerLost,
    checked,
    log_prob,
    moved,
    unpack,
)

CPU = torch.device("cpu")
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray; off, Ray's own servers listen on the loopback address, not on all addresses as by default on Linux."""
STORE = 256 * 2**20
"""Bytes of shared memory for small objects in a cluster of our own; the rest goes to disk."""
PATIENCE = 5
"""Seconds in which a cluster's head has to answer."""


def find_ray(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None or address.startswith("127."):
        os.environ.setdefault(LOOPBACK, "0")  # read when Ray is imported
    try:
        import ray
    except ImportError as error:
        raise ConfigError('Ray is not installed: pip install "sage-grpo[ray]".') from error
    return ray


@contextmanager
def connected(address: str | None, cpus: float = 0, large: int = 0) -> Iterator[Any]:
    """Ray, connected to a cluster: HOST:PORT of its head, or `auto` for the one of this machine. None starts one with `cpus` CPUs (at least all of
    this machine) and room for `large` bytes of weights, and ends it on exit; a connection that the process has already is kept."""
    ray = find_ray(address)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {}
    if address is None:
        more = math.ceil(cpus) if cpus > (os.cpu_count() or 1) else None
        options = {"num_cpus": more, "include_dashboard": False, "object_store_memory": STORE + large}
    elif address != "auto":
        _knock(address)
    stops = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"No connection to the Ray cluster at {address or 'loopback'}: {error}") from error
    try:
        if current_thread() is main_thread():  # Ray installs a handler of its own
            signal.signal(signal.SIGTERM, stops or signal.SIG_DFL)
        where = {node["NodeManagerAddress"] for node in ray.nodes()}
        if address is None and where != {"127.0.0.1"}:
            raise ConfigError(
                f"Ray listens on {', '.join(sorted(where))}, where others could run code on this machine, because it was imported before it was asked for. "
                f"Set {LOOPBACK}=0 in the environment, or give the address of a cluster of your own."
            )
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address without a cluster's head at once, because Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address!r} ({error}): give HOST:PORT of its head, as `ray start --head` prints it, or auto (docs/scale.md#sample-on-other-gpus-with-ray)."
        ) from error


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
        reason = "without rollout.ray.address: a cluster that one of them started would end with it; start one (docs/scale.md#sample-on-other-gpus-with-ray)"
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Worker:
    """Holds the model and the rewards. Text encoders and the optimizer stay in the trainer."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        threads: int,
        paths: Sequence[str],
        attention: tuple[str, str] | None = None,
    ) -> None:
        """ranks: training processes, among which plans divide clips. threads: PyTorch's CPU threads, as in the trainer:
        other numbers change the last bits of sums. paths: import paths of the trainer. attention: the trainer's
        device, and the kernel that it measured to be the fastest. The same kind of card uses it without measuring:
        beside other processes another one could win, with other last bits."""
        torch.set_num_threads(threads)
        sys.path += [path for path in paths if path not in sys.path]
        if config.model.device.startswith("cuda:"):  # Ray shows every worker only its own GPU
            config = replace(config, model=replace(config.model, device="cuda"))
        if attention is not None and attention[0] == device_name(choose_device(config.model.device)):
            config = replace(config, model=replace(config.model, attention=attention[1]))
        get_ready(wanted=config.model.deterministic)
        model = load_model(config, choose_device(config.model.device))
        config.model.check_budget(model.device.type)
        hold_to_budget(config.model, model.device)
        self.version = -1
        self.engine = RolloutEngine(config, model, load_rewards(config, model.device), world=World(size=ranks))

    def run(self, task: RolloutTask, weights: bytes) -> TaskResult:
        began, engine = time.perf_counter(), self.engine
        if task.version != self.version:
            unpack(weights, engine.model.trainable())
            self.version = task.version
        plan = engine.planner.plan(task.iteration, task.prompts).tasks(task.rank)[task.part]
        rollout = engine.sampler(plan, moved(task.conditions, engine.model.device)).run()
        clips = engine.judge(rollout, plan, whole=task.whole)
        # Clips are sent only if an observer needs them.
        videos = clips.videos.to(CPU) if task.whole else black_clips(engine.model.video)
        clips = replace(clips, videos=videos, sound=clips.sound if task.whole else None)
        replay = checked(plan, rollout.records)
        record = rollout.records[replay]
        sends_latents = engine.config.build_objective().differentiates
        result = TaskResult(
            records={replay: SavedRecord.of(record) for replay, record in rollout.records.items()},
            log_prob=log_prob(record, replay.step).to(CPU) if record.log_prob_old is None else None,
            latents=[(batch, rows.to(CPU)) for batch, rows in rollout.latents if sends_latents],
            clips=clips,
            seconds=time.perf_counter() - began,
        )
        settle(engine.model.device)
        return result


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
        if self._killed:
            raise WorkerLost(name)
        self._actors[name] = self._class.remote(*self._arguments)
        self._get(self._actors[name].__ray_ready__.remote())
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
        self._killed = True
        for actor in self._actors.values():
            self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, which ends if this run started it."""
        self._open.close()
