"""A worker pool in this process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

import torch

from sage_grpo.run.session import assemble
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import RolloutTask, TaskResult, WorkerLost
from sage_grpo.workers.ray_pool import Worker

Behaviour = Callable[[str, RolloutTask], str]
"""Of a worker at a task: it "dies", "fails" or returns "wrong" results; an empty string does the task."""


class InProcess:
    """Workers that take turns; all are one object."""

    def __init__(self, config: TrainConfig, names: Sequence[str], outcome: Behaviour, ranks: int = 1) -> None:
        self.worker = Worker(config, ranks, torch.get_num_threads(), [])
        self.names, self.outcome, self.turn = list(names), outcome, Lock()
        self.weights: list[bytes] = []
        self.done: list[tuple[str, RolloutTask]] = []

    def start(self, name: str) -> str:
        return name

    def publish(self, weights: bytes) -> bytes:
        self.weights.append(weights)
        return weights

    def run(self, worker: str, task: RolloutTask, weights: bytes) -> TaskResult:
        with self.turn:
            outcome = self.outcome(worker, task)
            if outcome == "dies":
                raise WorkerLost("it died")
            if outcome == "fails":
                raise RuntimeError("out of memory")
            self.done.append((worker, task))
            result = self.worker.run(task, weights)
            return wrong(result) if outcome == "wrong" else result

    def kill(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.names = []


def wrong(result: TaskResult) -> TaskResult:
    records = {
        replay: saved._replace(log_prob_old=None if saved.log_prob_old is None else saved.log_prob_old + 0.05)
        for replay, saved in result.records.items()
    }
    return replace(result, records=records, log_prob=None if result.log_prob is None else result.log_prob + 0.05)


def with_workers(
    monkeypatch, config: TrainConfig, *names: str, outcome: Behaviour = lambda worker, task: ""
) -> Trainer:
    cpu = replace(config, model=replace(config.model, device="cpu"))
    monkeypatch.setattr(
        ray_pool,
        "RayWorkerPool",
        lambda config, engine, rank, ranks: InProcess(cpu, names, outcome, ranks),
    )
    monkeypatch.setattr(ray_pool, "find_ray", lambda address: None)
    return assemble(config, build(config))
