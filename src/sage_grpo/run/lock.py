"""Locks a run's folder for one run at a time, and shares the main process's decisions with all processes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.safe_io import check, regular


class FolderLocked(ConfigError):
    """Another process uses the folder; the message names it."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the operating system's lock on `.lock` in a folder, in which the owner's host, process and start are written.

    It ends with its process in any case; on a shared disk the file system carries it to other machines. A folder that is
    created for it is removed if it stays empty.
    """
    file = out / ".lock"
    lock = FileLock(file, timeout=0, thread_local=False)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                raise ConfigError(
                    f"{file} is a link, to {os.readlink(file)}; a run would write there. Remove it, or choose another `out`."
                )
            if regular(file).exists() and file.stat().st_nlink > 1:  # another file would be overwritten
                file.unlink()
            lock.acquire()
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            file.write_text(json.dumps(owner))
        except Timeout as error:
            owner = {}
            with suppress(OSError, ValueError, TypeError):  # half written
                owner = dict(parse_json(file.read_text()))
            name = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
            raise FolderLocked(
                f"{out} is in use by another run ({name}). Wait for it or end it (it saves on SIGTERM), or choose another `out`."
            ) from error
        except OSError as error:
            raise ConfigError(f"The run's folder {out} cannot be written: {error}. Choose another `out`.") from error
        yield
    finally:
        with suppress(OSError):
            if lock.is_locked:
                file.unlink()  # a process that has opened it meanwhile sees that it is gone, and makes another
        lock.release()
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


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


@contextmanager
def owned(out: Path, world: World) -> Iterator[None]:
    """Lock a run's folder; refuses links out of it, and one with other files and no run, such as a home folder."""
    with ExitStack() as stack:

        def acquire() -> str:
            stack.enter_context(locked(out))
            check(out, ENTRIES)
            names = sorted(os.listdir(out))
            strange = [one for one in names if one not in ENTRIES and not any(fnmatch(one, log) for log in LOGS)]
            if strange and not any(name in MARKS for name in names):
                more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
                raise ConfigError(
                    f"{out} holds other files but no run: {', '.join(strange[:3])}{more}. Choose another `out`: a new folder, an empty one, "
                    "or that of a run, which is continued."
                )
            return ""

        by_main(world, acquire)
        yield


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
