"""A sign of life in the rendezvous store, so that the ranks that are left can name the one that is missing."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

INTERVAL = 1.0
"""Seconds between signs of life."""


class Heartbeat:
    """Counts up in the store from a thread; a count that stands still is a process that is gone."""

    def __init__(self, number: int, processes: int, store: dist.Store, patience: float) -> None:
        self.number, self.processes, self.patience = number, processes, patience
        self.where = "starting"
        self._store = store
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
            except dist.DistError:
                return  # the store is gone; the main thread meets the same
            self._stop.wait(INTERVAL)

    def stop(self) -> None:
        """No more signs of life."""
        self._stop.set()
        self._thread.join(timeout=5 * INTERVAL)

    def missing(self) -> str:
        """Which ranks gave no sign of life while we watched, and what they did last; for people."""
        others = [number for number in range(self.processes) if number != self.number]
        try:
            before = {number: self._read(number) for number in others}
            silent, deadline = set(others), time.monotonic() + self.patience
            # Gone means silent for several beats; a rank that is only slow clears itself at its next one.
            while silent and time.monotonic() < deadline:
                time.sleep(INTERVAL / 4)
                silent -= {number for number in silent if self._read(number)[0] != before[number][0]}
        except dist.DistError:
            return "The process that hosts the rendezvous (rank 0, or torchrun on the first node) is gone."
        if not silent:
            doing = ", ".join(f"rank {number}: {self._read(number)[1]}" for number in others)
            return f"All ranks are alive, but one did not arrive in time ({doing}). Raise parallel.timeout if it is only slow."
        gone = ", ".join(f"rank {number} (last seen at: {before[number][1]})" for number in sorted(silent))
        return (
            f"Lost {gone}. Its own output says why; a process killed without a word mostly ran out of memory. The same command "
            "continues from the last checkpoint."
        )

    def _read(self, number: int) -> tuple[str, str]:
        if not self._store.check([str(number)]):
            return "0", "starting"
        count, _, where = self._store.get(str(number)).decode().partition(" ")
        return count, where
