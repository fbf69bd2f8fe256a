"""Locks a run's folder for one run at a time, and shares the main process's decisions with all processes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.safe_io import check, regular


class FolderLocked(ConfigError):
    """Another process uses the folder; the message names it."""


class FolderLock:
    """The operating system's lock on `.lock`, in which its owner's host, process and start are written.

    It ends with its process in any case; on a shared disk the file system carries it to other machines.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / ".lock"
        self._lock = FileLock(self.file, timeout=0, thread_local=False)
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Lock the folder (and create it if missing), or raise FolderLocked with its owner."""
        try:
            self._made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
            self.out.mkdir(parents=True, exist_ok=True)
            if self.file.is_symlink():
                raise ConfigError(
                    f"{self.file} is a link, to {os.readlink(self.file)}; a run would write there. Remove it, or choose another `out`."
                )
            if regular(self.file).exists() and self.file.stat().st_nlink > 1:  # another file would be overwritten
                self.file.unlink()
            self._lock.acquire()
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            self.file.write_text(json.dumps(owner))
        except Timeout as error:
            owner = _owner(self.file)
            name = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
            raise FolderLocked(
                f"{self.out} is in use by another run ({name}). Wait for it or end it (it saves on SIGTERM), or choose another `out`."
            ) from error
        except OSError as error:
            self.release()
            raise ConfigError(
                f"The run's folder {self.out} cannot be written: {error}. Choose another `out`."
            ) from error

    def release(self) -> None:
        """Release the lock and remove its file, and folders that this lock created if they are empty."""
        if self._lock.is_locked:
            with suppress(OSError):
                self.file.unlink()  # a process that has opened it meanwhile sees that it is gone, and makes another
            self._lock.release()
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        self._made = []

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _owner(file: Path) -> dict[str, Any]:
    try:
        owner = parse_json(file.read_text())
    except (OSError, ValueError):  # half written
        return {}
    return owner if isinstance(owner, dict) else {}


ENTRIES = (
    "config.yaml", "schedule.json", "metrics.jsonl", ".metrics.jsonl.partial", "events.jsonl", ".finished", ".run_id", "checkpoints", "final", "best",
    "videos", "tensorboard", "profile", "latents", "report.html", "report_clips", "before_after",
)  # fmt: skip
"""Entries that a run writes into its folder. None may be a link out of it, because a folder from elsewhere would then
decide which files are overwritten."""
MARKS = ("metrics.jsonl", "events.jsonl", "schedule.json", "checkpoints")
"""Entries that only a run creates."""
LOGS = (".*", "*.log", "*.out", "*.err", "log*", "wandb")
"""Names that a launcher, a shell or a file system may have created before the run."""


def refuse_strangers(out: Path) -> None:
    """Refuse a folder with other files and no run, such as a home folder: the run's files would mix with them."""
    names = sorted(os.listdir(out))
    strange = [one for one in names if one not in ENTRIES and not any(fnmatch(one, log) for log in LOGS)]
    if strange and not any(name in MARKS for name in names):
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise ConfigError(
            f"{out} holds other files and no run: {', '.join(strange[:3])}{more}. Choose another `out`: a new folder, an empty one, or that of a run, "
            "which is continued."
        )


@contextmanager
def owned(out: Path, world: World) -> Iterator[None]:
    lock = FolderLock(out)

    def acquire() -> str:
        lock.acquire()
        try:
            check(out, ENTRIES)
            refuse_strangers(out)
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
    """Run a check in the main process; all processes get its result, or raise its error."""
    text, refused = "", None
    if world.is_main:
        try:
            text = f"={answer()}"
        except (ValueError, FileNotFoundError) as error:
            text, refused = f"!{error}", error
    text = world.from_main(text)
    if refused is not None:
        raise refused
    if text.startswith("!"):
        raise ConfigError(text[1:])
    return text[1:]
