"""Workers in this process: what a foreman does with workers, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sage_grpo.run.session import assemble
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import RolloutTask, TaskResult
from sage_grpo.workers.pool import JobResult
from sage_grpo.workers.worker import Worker

Fate = Callable[[str, RolloutTask], str]
"""What happens to a worker at a job: it "dies", "fails" or "lies"; nothing, and it does the job."""


class InProcess:
    """Workers that take turns. They are one object: a job says everything that counts."""

    def __init__(self, config: TrainConfig, names: Sequence[str], fate: Fate, ranks: int = 1, away=None) -> None:
        self.worker = Worker(config, ranks, torch.get_num_threads(), [], away or {})
        self.names, self.fate, self.replaces = list(names), fate, True
        self.weights: dict[int, bytes] = {}
        self.jobs: list[tuple[str, RolloutTask]] = []
        self.done: list[tuple[str, RolloutTask]] = []

    def ready(self) -> Sequence[str]:
        return list(self.names)

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        self.weights = {number: one for number, one in self.weights.items() if number >= oldest} | {version: weights}

    def start(self, worker: str, job: RolloutTask) -> None:
        self.jobs.append((worker, job))

    def wait(self, seconds: float) -> Sequence[JobResult]:
        """The last one first: results come back in any order."""
        if not self.jobs:
            return []
        worker, job = self.jobs.pop()
        fate = self.fate(worker, job)
        if fate == "dies":
            self.names.remove(worker)
            self.names += [f"{worker}'"] if self.replaces else []
            return [JobResult(worker, error="it died", lost=True)]
        if fate == "fails":
            return [JobResult(worker, error="out of memory")]
        self.done.append((worker, job))
        made = self.worker.make(job, self.weights[job.version])
        return [JobResult(worker, wrong(made) if fate == "lies" else made)]

    def dismiss(self, worker: str) -> None:
        self.names.remove(worker)

    def hope(self) -> str:
        return "" if self.names else "all are gone"

    def close(self) -> None:
        self.names = []


def wrong(made: TaskResult) -> TaskResult:
    """Log-probabilities that another network might have."""
    records = {
        replay: replace(kept, log_prob_old=None if kept.log_prob_old is None else kept.log_prob_old + 0.05)
        for replay, kept in made.records.items()
    }
    return replace(made, records=records, proof=None if made.proof is None else made.proof + 0.05)


def employing(monkeypatch, config: TrainConfig, *names: str, fate: Fate = lambda worker, job: "") -> Trainer:
    """A trainer whose workers are in this process."""
    own = replace(config, model=replace(config.model, device="cpu"))
    monkeypatch.setattr(
        ray_pool,
        "RayWorkerPool",
        lambda config, studio, rank, ranks: InProcess(own, names, fate, ranks, studio.reward.away),
    )
    monkeypatch.setattr(ray_pool, "find_ray", lambda address: None)
    return assemble(config, build(config))
