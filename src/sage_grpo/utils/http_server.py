"""Shared parts of our servers (rewards, the study): addresses, limits on connections, refusals and shutdown."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn


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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(host: str, port: int) -> None:
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
    """Run until SIGINT or SIGTERM; requests being answered are finished first. False if it could not listen. `settings`: of `server_config`."""
    import uvicorn

    server = uvicorn.Server(server_config(app, **settings))
    with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn after its orderly end
        server.run()
    return server.started


def server_config(app: Any, *, header_timeout: float, max_connections: int, **settings: Any) -> uvicorn.Config:
    """uvicorn's configuration: at most `max_connections` at a time, and none that is silent for longer than `header_timeout` seconds."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class HeaderTimeout(base):
        """uvicorn's own protocol; it would keep a connection for ever that never sends a whole request."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.await_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.await_headers()

        def await_headers(self) -> None:
            last = self.cycle

            def close() -> None:
                if self.cycle is last and (last is None or last.response_complete):
                    self.transport.abort()

            self.loop.call_later(header_timeout, close)

    # bursts of a whole training run: connections wait in the kernel instead of being refused
    options = {"backlog": 4096, "limit_concurrency": max_connections + 1, **settings}  # uvicorn refuses the last one
    return uvicorn.Config(app, http=HeaderTimeout, **options)
