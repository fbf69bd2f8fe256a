"""The run's folder belongs to one run, and what its main process finds out there all processes know."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sage_grpo.configure import ConfigError
from sage_grpo.parallel.world import World
from sage_grpo.train.folder.lock import FolderLock


@contextmanager
def owned(out: Path, world: World) -> Iterator[None]:
    """The run's folder, for this run alone."""
    lock = FolderLock(out)

    def acquire() -> str:
        lock.acquire()
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


def write(file: Path, text: str) -> None:
    """Replace a file; whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
