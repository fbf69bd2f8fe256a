"""What a foreman asks of workers, wherever they are: `on_ray.py` has them on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sage_grpo.workers.messages import Job, Result


@dataclass(frozen=True)
class Told:
    """What became of a worker's job."""

    worker: str
    result: Result | None = None
    error: str = ""
    """Why there is none."""
    lost: bool = False
    """The worker is gone."""


class Hands(Protocol):
    """The workers, wherever they are."""

    def ready(self) -> Sequence[str]:
        """Those who can work, also those who do."""
        ...

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """Weights for the jobs that name this version; those before the `oldest` are not needed any more."""
        ...

    def start(self, worker: str, job: Job) -> None:
        """Give a worker a job."""
        ...

    def wait(self, seconds: float) -> Sequence[Told]:
        """What became of jobs since the last call; waits for so long where there is nothing yet."""
        ...

    def dismiss(self, worker: str) -> None:
        """Send a worker away for good."""
        ...

    def hope(self) -> str:
        """Empty while more workers may come, else why none will."""
        ...

    def close(self) -> None:
        """Send all away."""
        ...
