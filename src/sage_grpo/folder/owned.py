"""The run's folder belongs to one run, and what its main process finds out there all processes know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sage_grpo.configure import ConfigError
from sage_grpo.folder.lock import FolderLock
from sage_grpo.inside import check
from sage_grpo.parallel.world import World

KEPT = (
    "config.yaml", "schedule.json", "metrics.jsonl", ".metrics.jsonl.partial", "events.jsonl", ".finished", "checkpoints", "final", "best", "videos",
    "tensorboard", "profile", "report.html", "report_clips", "before_after",
)  # fmt: skip
"""What a run writes into its folder. None of it may lead out: the folder may be somebody else's, whose links would decide what is overwritten."""


@contextmanager
def owned(out: Path, world: World) -> Iterator[None]:
    """The run's folder, for this run alone."""
    lock = FolderLock(out)

    def acquire() -> str:
        lock.acquire()
        try:
            check(out, KEPT)
        except ValueError:
            lock.release()
            raise
        return ""

    by_main(world, acquire)
    try:
        yield
    finally:
        lock.release()


def by_main(world: World, answer: Callable[[], str]) -> str:
    """What the main process found out, on all; what it refuses is refused by all."""
    said, refused = "", None
    if world.is_main:
        try:
            said = f"={answer()}"
        except (ValueError, FileNotFoundError) as error:
            said, refused = f"!{error}", error
    said = world.from_main(said)
    if refused is not None:
        raise refused
    if said.startswith("!"):
        raise ConfigError(said[1:])
    return said[1:]
