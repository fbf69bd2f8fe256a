"""Which of several reward servers gets the next request: the one that will answer first, and none that just failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult

from sage_grpo.rewards.asking import Backoff

log = logging.getLogger(__name__)

FORGET = 60.0
"""Seconds in which half of what is known about a server's speed is forgotten: slow ones are tried again now and then."""

UNKNOWN = 5.0
"""Seconds that a server is thought to take before it has answered anything."""
LONGEST = 600.0
"""Seconds that a server which hung is left alone at most."""


@dataclass
class Server:
    """What is known about one server."""

    url: SplitResult
    seconds: float | None = None
    """How long a request takes, averaged over the last ones; None before the first."""
    measured: float = 0.0
    """When that was."""
    failures: int = 0
    """Failures since the last success; failures of one moment count once."""
    down_until: float = 0.0
    """It is left alone until then."""
    running: dict[int, float] = field(default_factory=dict)
    """The requests it has now, by number, with their starts."""

    def cost(self, now: float, guess: float) -> tuple[float, int]:
        """Seconds until one more request would be answered, then the requests that it has.

        A request that still runs says that one takes at least so long. A server that was never heard of costs nothing for its
        first request, and for the next ones as much as `guess` until the first is answered.
        """
        known = guess if self.running else 0.0
        if self.seconds is not None:
            known = self.seconds * 0.5 ** ((now - self.measured) / FORGET)
        expected = max([known, *(now - start for start in self.running.values())])
        return (len(self.running) + 1) * expected, len(self.running)


class Pool:
    """The servers of a remote reward. All methods may be called from many threads."""

    def __init__(self, urls: Sequence[SplitResult], backoff: Backoff) -> None:
        self.servers = [Server(url) for url in urls]
        self._backoff = backoff
        self._lock = threading.Lock()
        self._turn, self._number = 0, 0

    def acquire(self, avoid: Collection[Server] = (), *, patient: bool = False) -> tuple[Server, int] | None:
        """The server to ask and the number of the request; None where there is none but those to avoid.

        Servers that failed are left alone for a time that doubles with every failure, and then get one request to try. When all
        are left alone, the one whose time is up first is asked, or none where `patient`.
        """
        with self._lock:
            now = time.monotonic()
            self._turn += 1
            first = self._turn % len(self.servers)
            order = [s for s in self.servers[first:] + self.servers[:first] if all(s is not other for other in avoid)]
            ready = [s for s in order if s.down_until <= now and not (s.failures and s.running)]
            if not order or (patient and not ready):
                return None
            guess = max((s.seconds for s in ready if s.seconds is not None), default=0.0)
            chosen = min(ready, key=lambda s: s.cost(now, guess)) if ready else min(order, key=lambda s: s.down_until)
            self._number += 1
            chosen.running[self._number] = now
            return chosen, self._number

    def succeeded(self, server: Server, number: int) -> None:
        """The request was answered."""
        with self._lock:
            now = time.monotonic()
            took = now - server.running.pop(number)
            server.seconds = took if server.seconds is None else 0.7 * server.seconds + 0.3 * took
            server.measured, server.failures, server.down_until = now, 0, 0.0

    def busy(self, server: Server, number: int) -> None:
        """The server has too much to do: it is well, but not asked for a moment."""
        with self._lock:
            server.running.pop(number)
            server.down_until = max(server.down_until, time.monotonic() + self._backoff.first)

    def dropped(self, server: Server, number: int, *, late: bool) -> None:
        """The answer is no longer needed; `late` when another server gave it first: asking this one gained nothing."""
        with self._lock:
            now, start = time.monotonic(), server.running.pop(number)
            server.seconds = max(now - start, server.seconds or 0.0)
            if late:
                self._lock_out(server, now, start, "another server answered its request first")

    def failed(self, server: Server, number: int, reason: str) -> None:
        """The server hung, answered nonsense or an error."""
        with self._lock:
            now, start = time.monotonic(), server.running.pop(number)
            self._lock_out(server, now, start, reason)

    def distrust(self, server: Server, reason: str) -> None:
        """The server answered without scores where another one had some."""
        with self._lock:
            now = time.monotonic()
            self._lock_out(server, now, now, reason)

    def _lock_out(self, server: Server, now: float, start: float, reason: str) -> None:
        if now < server.down_until or (server.failures and start <= server.measured):
            return  # one of many requests that failed together
        # A server that hung is left alone for at least as long as it cost.
        pause = max(self._backoff.full(server.failures), min(now - start, LONGEST))
        server.failures, server.down_until, server.measured = server.failures + 1, now + pause, now
        log.warning(
            "Reward server %s failed (%s): left alone for %.3g s, failure %d in a row.",
            server.url.geturl(),
            reason[:300],
            pause,
            server.failures,
        )

    def quicker(self, waited: float, avoid: Collection[Server], factor: float) -> tuple[Server, int] | None:
        """A server that has answered `factor` times over what another one has had for `waited` seconds; None without one."""
        found = self.acquire(avoid, patient=True)
        if found is None:
            return None
        server, number = found
        with self._lock:
            usual = UNKNOWN if server.seconds is None else server.seconds * len(server.running)
            if waited > factor * usual + 0.01:
                return found
            server.running.pop(number)
        return None
