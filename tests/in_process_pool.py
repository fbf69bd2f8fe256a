"""A worker pool in this process, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sage_grpo.run.session import assemble
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer
from sage_grpo.workers import ray_pool
from sage_grpo.workers.dispatcher import Outcome
from sage_grpo.workers.messages import RolloutTask, TaskResult
from sage_grpo.workers.worker import Worker

Behaviour = Callable[[str, RolloutTask], str]
"""Of a worker at a task: it "dies", "fails" or returns "wrong" results; an empty string does the task."""


class InProcess:
    """Workers that take turns; all are one object."""

    def __init__(self, config: TrainConfig, names: Sequence[str], outcome: Behaviour, ranks: int = 1) -> None:
        self.worker = Worker(config, ranks, torch.get_num_threads(), [])
        self.names, self.outcome, self.replaces = list(names), outcome, True
        self.weights: dict[int, bytes] = {}
        self.tasks: list[tuple[str, RolloutTask]] = []
        self.done: list[tuple[str, RolloutTask]] = []

    def ready(self) -> Sequence[str]:
        return list(self.names)

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        self.weights = {number: one for number, one in self.weights.items() if number >= oldest} | {version: weights}

    def start(self, worker: str, task: RolloutTask) -> None:
        self.tasks.append((worker, task))

    def wait(self, seconds: float) -> Sequence[Outcome]:
        if not self.tasks:
            return []
        worker, task = self.tasks.pop()
        outcome = self.outcome(worker, task)
        if outcome == "dies":
            self.names.remove(worker)
            self.names += [f"{worker}'"] if self.replaces else []
            return [Outcome(worker, error="it died", lost=True)]
        if outcome == "fails":
            return [Outcome(worker, error="out of memory")]
        self.done.append((worker, task))
        result = self.worker.run(task, self.weights[task.version])
        return [Outcome(worker, wrong(result) if outcome == "wrong" else result)]

    def dismiss(self, worker: str) -> None:
        self.names.remove(worker)

    def exhausted_reason(self) -> str:
        return "" if self.names else "all are gone"

    def close(self) -> None:
        self.names = []


def wrong(result: TaskResult) -> TaskResult:
    records = {
        replay: replace(saved, log_prob_old=None if saved.log_prob_old is None else saved.log_prob_old + 0.05)
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
