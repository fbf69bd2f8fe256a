"""A Ray cluster: one that is there, or one that is started here, which nobody else can reach. Ray is imported here alone, and only where it was asked
for."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from sage_grpo.config.parsing import ConfigError

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, Ray's own servers listen on the loopback address: on Linux they would listen on all of them, whatever address is asked for."""
STORE = 256 * 2**20
"""Bytes of shared memory for small things that travel in a cluster of our own; what does not fit goes to disk."""
PATIENCE = 5
"""Seconds in which a cluster's head has to answer."""


def find_ray(address: str | None) -> Any:
    """The package, or what to do without it."""
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
    """Ray, connected to a cluster: HOST:PORT of its head, or `auto` for the one that this machine belongs to. None starts one with so many CPUs, or as
    many as there are, and with room for so many bytes of weights, which ends with this; a connection that the process has already stays."""
    ray = find_ray(address)
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {}
    if address is None:
        more = math.ceil(cpus) if cpus > (os.cpu_count() or 1) else None
        own = {"num_cpus": more, "include_dashboard": False, "object_store_memory": STORE + large}
    elif address != "auto":
        _knock(address)
    stops = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"No connection to the Ray cluster at {address or 'loopback'}: {error}") from error
    try:
        if current_thread() is main_thread():  # Ray takes the signal for itself
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


class Actors:
    """Copies of one object, each in a process of a cluster. Who holds this can ask them, in any process of the cluster."""

    def __init__(self, ray: Any, copies: Sequence[Any]) -> None:
        self._ray, self._copies = ray, list(copies)
        self._asked = 0

    def ask(self, method: str, *given: Any) -> Any:
        """What one of them answers, in turn; each process begins elsewhere. One that dies Ray starts again, and asks it again."""
        one = self._copies[(os.getpid() + self._asked) % len(self._copies)]
        self._asked += 1
        try:
            return self._ray.get(getattr(one, method).remote(*given))
        except self._ray.exceptions.RayActorError as error:
            raise ConfigError(f"An actor could not start: {error}") from error


@contextmanager
def hired(ray: Any, kind: type, given: Sequence[Any], *, copies: int, cpus: float, gpus: float) -> Iterator[Actors]:
    """Copies of an object on the cluster while this lasts."""
    made = ray.remote(kind).options(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)
    actors = [made.remote(*given) for _ in range(copies)]
    try:
        yield Actors(ray, actors)
    finally:
        for one in actors:
            ray.kill(one)


def _knock(address: str) -> None:
    """Ray would wait for minutes for a head that is not there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address!r} ({error}): give HOST:PORT of its head, as `ray start --head` says, or auto (docs/guides/ray.md)."
        ) from error
