"""Heartbeats in the rendezvous store: the other ranks name a lost rank, all ranks end with their launcher, and a message of all is printed once."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

INTERVAL = 1.0
"""Seconds between heartbeats."""
SILENT = 60.0
"""Seconds after which a rank without heartbeats counts as lost: loading and compiling may hold Python up."""
LAST_WORDS = 60.0
"""Seconds that a slow store may take for a rank's last message."""
PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
GONE = "left"
"""The last heartbeat of a rank that ended in good order."""
LOST = (
    "Lost {}. Its output has the reason; `kill -CONT` wakes a stopped process, and a process killed without a message mostly ran out of memory. "
    "The same command continues from the last checkpoint."
)


@dataclass
class Beat:
    """The last heartbeat of a rank; none yet if the count is 0."""

    count: str
    where: str
    time: float


class Heartbeat:
    """Counts up in the store from a thread, and watches the other ranks' counts; one that stops is a lost process.

    Observations are kept: the first process to give up may take the store with it, and the next ones must still be able to name the rank that began
    it. A lost rank is noticed within a minute, also while the main thread waits in a collective that would give up only after its timeout.
    """

    def __init__(self, number: int, processes: int, store: dist.Store, patience: float) -> None:
        self.number, self.patience = number, patience
        self.where = "starting"
        self.leave: Callable[[str], None] = _leave
        """Called with a message when a rank is lost; it ends the process, because the main thread may be waiting in a collective."""
        self._store = store
        self._others = [other for other in range(processes) if other != number]
        self._seen = {other: Beat("0", "starting", time.monotonic()) for other in self._others}
        self._all_started = False
        self._asked = False
        self._store_lost: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def start(cls, number: int, processes: int, *, patience: float) -> Heartbeat:
        """Start, with a connection of its own: the process group may block the other one."""
        given: Any = _get_default_store()  # torch's types lack `clone`
        beat = cls(number, processes, dist.PrefixStore("sage_grpo/heartbeat", given.clone()), patience)
        beat._thread.start()
        return beat

    def _beat(self) -> None:
        count, before = 0, time.monotonic()
        while not self._stop.is_set():
            count += 1
            try:
                self._store.set(str(self.number), f"{count} {self.where}")
                self._look()
            except dist.DistError:
                self._store_lost = time.monotonic()
                return
            now = time.monotonic()
            self._check(now, paused=now - before > SILENT / 2)
            before = now
            self._stop.wait(INTERVAL)

    def _look(self) -> None:
        keys = [str(other) for other in self._others]
        self._all_started = self._all_started or not keys or self._store.check(keys)
        if not self._all_started:
            return  # multi_get would wait for the last one
        for other, value in zip(self._others, self._store.multi_get(keys)):
            count, where = value.decode().split(" ", 1)
            if count != self._seen[other].count:
                self._seen[other] = Beat(count, where, time.monotonic())

    def _check(self, now: float, *, paused: bool) -> None:
        """Leave if a rank is lost and the main thread has not noticed. paused: this process was stopped, or the store did not answer."""
        if paused:
            for beat in self._seen.values():
                beat.time = now
        lost = [
            f"rank {other} (last seen at: {beat.where})"
            for other, beat in self._seen.items()
            if now - beat.time > SILENT and beat.count not in ("0", GONE)
        ]
        if lost and not self._asked:
            self.leave(LOST.format(", ".join(lost)))
            self._asked = True

    def stop(self) -> None:
        self._stop.set()
        # A thread that still uses the store when the interpreter ends would abort the process.
        self._thread.join(timeout=LAST_WORDS)
        if self._store_lost is None:
            try:
                self._store.set(str(self.number), f"{GONE} {self.where}")
            except dist.DistError:  # the store's host has left before us
                self._store_lost = time.monotonic()

    def farewell(self, patience: float = 10.0) -> None:
        """Wait a little until the others have left too: connections that close one by one may abort the remaining processes."""
        until = time.monotonic() + patience
        while self._store_lost is None and time.monotonic() < until:
            try:
                self._look()
            except dist.DistError:  # the store's host has left
                return
            if all(beat.count == GONE for beat in self._seen.values()):
                return
            time.sleep(0.05)

    def missing(self) -> str:
        self._asked = True
        asked = time.monotonic()
        # A beat from before a death may be seen a little after it, so only later ones count. Gone means silent for several
        # beats; a rank that is only slow clears itself at its next one.
        alive_from = asked + 2 * INTERVAL
        while self._store_lost is None and self._silent(alive_from) and time.monotonic() < asked + self.patience:
            time.sleep(INTERVAL / 4)
        lost = self._store_lost
        # The first to give up watched for longer than this before it took the store away.
        if silent := self._silent(alive_from if lost is None else lost - 3 * INTERVAL):
            return LOST.format(", ".join(f"rank {other} (last seen at: {self._seen[other].where})" for other in silent))
        if lost is not None:
            return "The process that hosts the rendezvous (rank 0, or torchrun on the first node) is gone."
        doing = ", ".join(f"rank {other}: {self._seen[other].where}" for other in self._others)
        return (
            f"All ranks are alive, but one did not arrive in time ({doing}). Raise parallel.timeout if it is only slow."
        )

    def _silent(self, since: float) -> list[int]:
        return [other for other in self._others if self._seen[other].time < since]


def _leave(message: str) -> NoReturn:
    print(f"sage-grpo train stopped: {message}", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may wait in a collective for the rank that is gone


def end_with_parent() -> None:
    """Get SIGTERM (finish the iteration, save, leave) when the process that started this one ends, also if it is killed: torchrun ends its ranks itself
    in all other cases. Linux only."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def is_first_to_say(text: str) -> bool:
    """True unless another process of this run has said the same, by the launcher's store; also where the store cannot be reached."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        return store.add(f"sage_grpo/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return True
