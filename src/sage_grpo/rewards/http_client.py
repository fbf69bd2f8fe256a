"""HTTP client of rewards that compute elsewhere: one request, and the pauses between tries."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar
from urllib.parse import SplitResult

from sage_grpo.config.ranges import Count, Natural, NotNegative, Seconds, checked
from sage_grpo.rewards.functions import RewardConfigError, check_known

Group = TypeVar("Group")
CONNECT_SECONDS = 10.0
"""Seconds for opening a connection; a machine that takes longer counts as unreachable."""
_JITTER = random.Random()  # separate: the run's random numbers must not depend on the network


@checked
class RetryOptions:
    """Timeouts, retries and parallel requests. A pause is doubled after every try, up to the longest one."""

    timeout: Seconds = 120.0  # seconds for one try
    retries: Natural = 5  # tries after the first
    backoff: NotNegative = 1.0  # first pause in seconds
    max_wait: NotNegative = 120.0  # longest pause; a server that asks for a longer one is given up
    parallel: Count = 4  # requests at a time

    def longest_pause(self, attempt: int) -> float:
        """The pause after a try that failed; tries count from 0."""
        return min(self.max_wait, self.backoff * 2**attempt)

    def pause(self, attempt: int) -> float:
        """The same with jitter, so that requests that failed together are not repeated together."""
        return self.longest_pause(attempt) * _JITTER.uniform(0.5, 1.0)


def read_group(kind: type[Group], what: str, given: Mapping[str, Any] | None) -> Group:
    """A group of options from a reward's `options`; RewardConfigError begins with `what`."""
    check_known(given or {}, [field.name for field in fields(kind)], f"{what} have no")  # type: ignore[arg-type]
    try:
        return kind(**(given or {}))
    except (TypeError, ValueError) as error:
        raise RewardConfigError(f"{what}: {error}") from error


class Connections:
    """Open connections of several threads; at the end of the `with` block they are cut, so that no thread waits for an answer or tries again."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.stop.set()
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def holding(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self.stop.is_set():
                raise ConnectionAbortedError("The answer is no longer needed.")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(sock)


def post(
    url: SplitResult,
    path: str,
    body: Sequence[bytes | memoryview],
    *,
    kind: str,
    token: str,
    timeout: float,
    largest: int,
    connections: Connections,
) -> tuple[int, dict[str, str], bytes]:
    """Send the pieces of a body to a path below the address, once: status, headers with small names, and the answer. Raises OSError or HTTPException.

    kind: content type. timeout: seconds for the whole try. largest: bytes of an answer that are still read.
    """
    secure = url.scheme == "https"
    connection_kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    port = url.port or (443 if secure else 80)
    connection = connection_kind(url.hostname or "", port, timeout=min(timeout, CONNECT_SECONDS))
    headers = {"Content-Type": kind, "Connection": "close", "Content-Length": str(sum(len(piece) for piece in body))}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    deadline = time.monotonic() + timeout
    with contextlib.closing(connection):
        connection.connect()
        connection.sock.settimeout(timeout)
        with connections.holding(connection.sock):
            # a server may refuse the body early and close: its answer still has the reason
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", f"{url.path.rstrip('/')}{path}", body=body, headers=headers)
            response = connection.getresponse()
            answer = bytearray()
            while chunk := response.read1(65536):
                answer += chunk
                if len(answer) > largest or time.monotonic() > deadline:
                    raise http.client.HTTPException("the answer is too large or too slow")
            if response.length:  # fewer bytes than announced
                raise http.client.IncompleteRead(bytes(answer[:100]), response.length)
            return response.status, {name.lower(): value for name, value in response.getheaders()}, bytes(answer)
