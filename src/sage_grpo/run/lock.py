"""Locks a run's folder for one run at a time, and shares the main process's decisions with all processes."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.heartbeat import own_place
from sage_grpo.distributed.world import World
from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.safe_io import NO_LINKS, check, regular

try:
    import fcntl
except ImportError:  # not on Windows: the touches alone decide there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
BEAT = 3.0
"""Seconds between two touches of the lock file by its owner."""
PATIENCE = 12.0
"""Seconds without a touch after which the owner of a lock on another machine counts as dead."""


class FolderLocked(ConfigError):
    """Another process uses the folder; the message names it."""


class FolderLock:
    """A lock file with the owner's host, process and start.

    The operating system's lock (flock) decides where possible: it ends with its process in any case. On a shared disk
    it may not reach other machines, so the owner also touches the file every few seconds, and a process that finds the
    file of another machine waits for a touch before taking it over. No clocks are compared.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.file = out, out / NAME
        self._stream: IO[str] | None = None
        self._made: list[Path] = []
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Lock the folder (and create it if missing), or raise FolderLocked with its owner."""
        try:
            self._made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
            self.out.mkdir(parents=True, exist_ok=True)
            self._stream = self._open()
            self._sign(self._stream)
        except OSError as error:
            self.release()
            raise ConfigError(
                f"The run's folder {self.out} cannot be written: {error}. Choose another `out`."
            ) from error
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _open(self) -> IO[str]:
        while True:
            stream = self._file()
            sure = _flock(stream)
            if sure is False:
                raise FolderLocked(self._refusal(_owner(stream)))
            # A hard link to another file, which signing would empty.
            if sure and os.fstat(stream.fileno()).st_nlink > 1:
                self.file.unlink(missing_ok=True)
            owner = _owner(stream) if self._is_in_place(stream) else {}
            here = str(owner.get("place", "")).rpartition(":")[0] == own_place().rpartition(":")[0] != ""
            if owner and not (sure and here) and self._touched(stream):
                stream.close()
                raise FolderLocked(self._refusal(owner))
            if self._is_in_place(stream):
                return stream
            stream.close()  # the owner removed the file meanwhile, or it was a foreign file

    def _is_in_place(self, stream: IO[str]) -> bool:
        """True if this is still the file under its name: a lock on a removed or replaced file has no effect."""
        try:
            return os.path.samestat(os.fstat(stream.fileno()), self.file.lstat())
        except OSError:
            return False

    def _file(self) -> IO[str]:
        """Open the lock file for writing; refuses links to other files."""
        if self.file.is_symlink():
            raise ConfigError(
                f"{self.file} is a link, to {os.readlink(self.file)}; a run would write there. Remove it, or choose another `out`."
            )
        return os.fdopen(os.open(regular(self.file), os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINKS, 0o666), "a+")

    def _sign(self, stream: IO[str]) -> None:
        stream.truncate(0)
        host, pid, since = socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
        json.dump({"host": host, "pid": pid, "since": since, "place": own_place()}, stream)
        stream.flush()
        os.fsync(stream.fileno())

    def _touched(self, stream: IO[str]) -> bool:
        """True if the owner touches the file while this process waits."""
        first, end = os.fstat(stream.fileno()).st_mtime_ns, time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(PATIENCE / 24)
            # Opening makes a shared disk ask its server again.
            with suppress(FileNotFoundError), self.file.open() as fresh:
                if os.fstat(fresh.fileno()).st_mtime_ns != first:
                    return True
        return False

    def _refusal(self, owner: dict[str, Any]) -> str:
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
        return f"{self.out} is in use by another run ({who}). Wait for it or end it (it saves on SIGTERM), or choose another `out`."

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            stream = self._stream
            with suppress(OSError):  # a temporary disk error; other processes wait for several touches
                if stream is not None and self._is_in_place(stream):  # never touch another run's file
                    os.utime(self.file)

    def release(self) -> None:
        """Release the lock and remove its file, and folders that this lock created if they are empty."""
        self._stop.set()
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


def _flock(stream: IO[str]) -> bool | None:
    """True if the operating system granted the lock; None if it has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return None
    return True


def _owner(stream: IO[str]) -> dict[str, Any]:
    stream.seek(0)
    try:
        owner = parse_json(stream.read() or "{}")
    except ValueError:
        return {"place": "?"}  # half written: wait for a touch
    return owner if isinstance(owner, dict) else {"place": "?"}


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
    """Context with an exclusive lock on the run's folder."""
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
