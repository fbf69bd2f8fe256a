"""Locks a run's folder for one run at a time, and shares the main process's decisions with all processes."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.safe_io import NO_LINKS, check, regular

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class FolderLocked(ConfigError):
    """Another process uses the folder; the message names it."""


class FolderLock:
    """The operating system's lock (flock) on `.lock`, in which its owner's host, process and start are written.

    It ends with its process in any case; on a shared disk the file system carries it to other machines. Not the package
    filelock: it empties the file on opening, also if that is a hard link to another one, and names no owner.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / ".lock"
        self._stream: IO[str] | None = None
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Lock the folder (and create it if missing), or raise FolderLocked with its owner."""
        try:
            self._made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
            self.out.mkdir(parents=True, exist_ok=True)
            self._stream = self._open()
            self._stream.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, self._stream)
            self._stream.flush()
        except OSError as error:
            self.release()
            raise ConfigError(
                f"The run's folder {self.out} cannot be written: {error}. Choose another `out`."
            ) from error

    def _open(self) -> IO[str]:
        """The locked file, still as it was."""
        while True:
            if self.file.is_symlink():
                raise ConfigError(
                    f"{self.file} is a link, to {os.readlink(self.file)}; a run would write there. Remove it, or choose another `out`."
                )
            descriptor = os.open(regular(self.file), os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINKS, 0o666)
            stream = os.fdopen(descriptor, "a+")
            self._lock(stream)
            if os.fstat(descriptor).st_nlink > 1:  # a hard link to another file, which would be emptied
                self.file.unlink(missing_ok=True)
            if self._is_in_place(stream):
                return stream
            stream.close()  # the owner removed the file meanwhile, or it was a foreign file

    def _lock(self, stream: IO[str]) -> None:
        try:
            if fcntl is None:
                raise OSError("the operating system has none")
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                owner = _owner(stream)
                stream.close()
                name = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
                raise FolderLocked(
                    f"{self.out} is in use by another run ({name}). Wait for it or end it (it saves on SIGTERM), or choose another `out`."
                ) from error
            warnings.warn(
                f"{self.out} cannot be locked ({error}): make sure that no other run works there.", stacklevel=4
            )

    def _is_in_place(self, stream: IO[str]) -> bool:
        """True if this is still the file under its name: a lock on a removed or replaced file has no effect."""
        try:
            return os.path.samestat(os.fstat(stream.fileno()), self.file.lstat())
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock and remove its file, and folders that this lock created if they are empty."""
        if self._stream is None:
            return
        with suppress(OSError):
            if self._is_in_place(self._stream):  # the file may have been removed and replaced by another run's
                self.file.unlink()
        self._stream.close()
        self._stream = None
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _owner(stream: IO[str]) -> dict[str, Any]:
    stream.seek(0)
    try:
        owner = parse_json(stream.read())
    except ValueError:  # half written
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
