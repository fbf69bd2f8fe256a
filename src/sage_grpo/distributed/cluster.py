"""A Ray cluster: an existing one, or one that is started here and that no other machine can reach. Ray is imported only here, and only on request."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from sage_grpo.config.parsing import ConfigError

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray; off, Ray's own servers listen on the loopback address, not on all addresses as by default on Linux."""
STORE = 256 * 2**20
"""Bytes of shared memory for small objects in a cluster of our own; the rest goes to disk."""
PATIENCE = 5
"""Seconds in which a cluster's head has to answer."""


def find_ray(address: str | None) -> Any:
    """The package ray; ConfigError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None or address.startswith("127."):
        os.environ.setdefault(LOOPBACK, "0")  # read when Ray is imported
    try:
        import ray
    except ImportError as error:
        raise ConfigError('Ray is not installed: pip install "sage-grpo[ray]".') from error
    return ray


@contextmanager
def connected(address: str | None, cpus: float = 0, large: int = 0) -> Iterator[Any]:
    """Ray, connected to a cluster: HOST:PORT of its head, or `auto` for the one of this machine. None starts one with `cpus` CPUs (at least all of
    this machine) and room for `large` bytes of weights, and ends it on exit; a connection that the process has already is kept."""
    ray = find_ray(address)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {}
    if address is None:
        more = math.ceil(cpus) if cpus > (os.cpu_count() or 1) else None
        options = {"num_cpus": more, "include_dashboard": False, "object_store_memory": STORE + large}
    elif address != "auto":
        _knock(address)
    stops = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"No connection to the Ray cluster at {address or 'loopback'}: {error}") from error
    try:
        if current_thread() is main_thread():  # Ray installs a handler of its own
            signal.signal(signal.SIGTERM, stops or signal.SIG_DFL)
        where = {node["NodeManagerAddress"] for node in ray.nodes()}
        if address is None and where != {"127.0.0.1"}:
            raise ConfigError(
                f"Ray listens on {', '.join(sorted(where))}, where others could run code on this machine, because it was imported before it was asked for. "
                f"Set {LOOPBACK}=0 in the environment, or give the address of a cluster of your own."
            )
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address without a cluster's head at once, because Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address!r} ({error}): give HOST:PORT of its head, as `ray start --head` says, or auto (docs/guides/ray.md)."
        ) from error
