"""Shared parts of our servers (rewards, the study): addresses, limits on connections, refusals and shutdown.

uvicorn does not watch connections: one that never sends a whole request would stay for ever. Here it is closed after a while, and at once when its
place is needed. One whose request is being answered is never closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_installed() -> None:
    """Refuse, before anything is loaded, if the libraries of a server are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ValueError('A server needs: pip install "sage-grpo[server]".')


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything is loaded for it."""
    if not 0 <= port <= 65535:  # some systems take the remainder
        raise ValueError(f"port must be in [0, 65535], got {port}.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"Nothing can listen on {host}:{port} ({error}). Choose another --port (0 takes any that is free) or --host."
        ) from error


def serve(app: Any, **settings: Any) -> bool:
    """Run until SIGINT or SIGTERM; requests being answered are finished first. False if it could not listen. `settings`: of `guarded_config`."""
    import uvicorn

    server = uvicorn.Server(guarded_config(app, **settings))
    with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn after its orderly end
        server.run()
    return server.started


def guarded_config(app: Any, *, header_timeout: float, max_connections: int, **settings: Any) -> uvicorn.Config:
    """uvicorn's configuration with a watch on connections."""
    import uvicorn

    # bursts of a whole training run: connections wait in the kernel instead of being refused
    options = {"backlog": 4096, **settings}
    return uvicorn.Config(app, http=guarded_protocol(header_timeout, max_connections), **options)


def guarded_protocol(header_timeout: float, max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's own HTTP protocol with a timeout for headers and a limit on connections."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    everyone: dict[Any, float] = {}
    """The open connections, with the time of their start or of their last answer."""

    class Guarded(base):
        timer: asyncio.TimerHandle | None = None

        def incomplete(self) -> bool:
            """True without a request, or with one that has not arrived in full."""
            return self.headerless() or self.cycle.more_body

        def headerless(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(everyone) >= max_connections:
                oldest = min((one for one in everyone if one.incomplete()), key=everyone.__getitem__, default=None)
                if oldest is None:
                    transport.write(BUSY)
                    transport.close()
                    return
                everyone.pop(oldest)
                oldest.transport.abort()
            everyone[self] = time.monotonic()
            self.watch()

        def connection_lost(self, exc: Exception | None) -> None:
            everyone.pop(self, None)
            self.unwatch()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in everyone:
                everyone[self] = time.monotonic()
            self.watch()

        def watch(self) -> None:
            """Run one timer while headers are missing: bytes that come one by one do not prolong it."""
            if not self.headerless() or self.transport.is_closing():
                self.unwatch()
            elif self.timer is None:
                self.timer = self.loop.call_later(header_timeout, self.transport.abort)

        def unwatch(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return Guarded
