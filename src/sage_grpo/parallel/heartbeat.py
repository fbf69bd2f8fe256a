"""A sign of life in the rendezvous store, so that the ranks that are left can name the one that is missing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

INTERVAL = 1.0
"""Seconds between signs of life."""


@dataclass(frozen=True)
class Sign:
    """The last that was seen of a rank."""

    count: str
    where: str
    time: float


class Heartbeat:
    """Counts up in the store from a thread, and watches the others do so; a count that stands still is a process that is gone.

    What was seen is remembered: the first process to give up may take the store with it, and the next ones must still be
    able to name the rank that began it.
    """

    def __init__(self, number: int, processes: int, store: dist.Store, patience: float) -> None:
        self.number, self.patience = number, patience
        self.where = "starting"
        self._store = store
        self._others = [other for other in range(processes) if other != number]
        self._seen = {other: Sign("0", "starting", time.monotonic()) for other in self._others}
        self._all_started = False
        self._store_lost: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def start(cls, number: int, processes: int, *, patience: float = 5.0) -> Heartbeat:
        """Begin, with a connection of its own: the process group may be blocked on the other."""
        beat = cls(number, processes, dist.PrefixStore("sage_grpo/heartbeat", _get_default_store().clone()), patience)
        beat._thread.start()
        return beat

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._store.set(str(self.number), f"{count} {self.where}")
                self._look()
            except dist.DistError:
                self._store_lost = time.monotonic()
                return
            self._stop.wait(INTERVAL)

    def _look(self) -> None:
        keys = [str(other) for other in self._others]
        self._all_started = self._all_started or not keys or self._store.check(keys)
        if not self._all_started:
            return  # multi_get would wait for the last one
        for other, value in zip(self._others, self._store.multi_get(keys)):
            count, _, where = value.decode().partition(" ")
            if count != self._seen[other].count:
                self._seen[other] = Sign(count, where, time.monotonic())

    def stop(self) -> None:
        """No more signs of life."""
        self._stop.set()
        self._thread.join(timeout=5 * INTERVAL)

    def missing(self) -> str:
        """Which ranks gave no sign of life while we watched, and what they did last; for people."""
        asked = time.monotonic()
        # A beat from before a death may be seen a little after it, so only later ones count. Gone means silent for several
        # beats; a rank that is only slow clears itself at its next one.
        alive_from = asked + 2 * INTERVAL
        while self._store_lost is None and self._silent(alive_from) and time.monotonic() < asked + self.patience:
            time.sleep(INTERVAL / 4)
        lost = self._store_lost
        # The first to give up watched for longer than this before it took the store away.
        silent = self._silent(alive_from if lost is None else lost - 3 * INTERVAL)
        if not silent and lost is not None:
            return "The process that hosts the rendezvous (rank 0, or torchrun on the first node) is gone."
        if not silent:
            doing = ", ".join(f"rank {other}: {self._seen[other].where}" for other in self._others)
            return f"All ranks are alive, but one did not arrive in time ({doing}). Raise parallel.timeout if it is only slow."
        gone = ", ".join(f"rank {other} (last seen at: {self._seen[other].where})" for other in silent)
        return (
            f"Lost {gone}. Its own output says why; a process killed without a word mostly ran out of memory. The same command "
            "continues from the last checkpoint."
        )

    def _silent(self, since: float) -> list[int]:
        return [other for other in self._others if self._seen[other].time < since]
