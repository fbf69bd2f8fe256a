"""Protocol of a worker pool for the dispatcher; ray_pool.py implements it on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sage_grpo.workers.messages import RolloutTask, TaskResult


@dataclass(frozen=True)
class JobResult:
    """Outcome of a worker's job."""

    worker: str
    result: TaskResult | None = None
    error: str = ""
    """Reason for a missing result."""
    lost: bool = False
    """The worker no longer exists."""


class WorkerPool(Protocol):
    """A pool of workers."""

    def ready(self) -> Sequence[str]:
        """Workers that are ready or busy."""
        ...

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """Publish weights for jobs with this version; versions before the `oldest` are no longer needed."""
        ...

    def start(self, worker: str, job: RolloutTask) -> None:
        """Start a job on a worker."""
        ...

    def wait(self, seconds: float) -> Sequence[JobResult]:
        """Outcomes of jobs since the last call; waits up to `seconds` for the first."""
        ...

    def dismiss(self, worker: str) -> None:
        """Remove a worker for good."""
        ...

    def hope(self) -> str:
        """The reason why no worker can join, or an empty string."""
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...
