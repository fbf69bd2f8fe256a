"""Reward servers for tests: in a thread, or in a process that can be killed."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import toy_rewards
import uvicorn

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import PartScores
from sage_grpo.rewards.serving import ServerLimits
from sage_grpo.rewards.serving.remote import RemoteReward
from sage_grpo.rewards.serving.server import RewardServer, composite_scorer, create_app
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.utils.http_server import server_config

STATES: dict[int, RewardServer] = {}
"""State of the servers in threads, by port."""


def content(videos, texts, fps) -> PartScores:
    return PartScores({"content": toy_rewards.content(videos, texts, fps)})


def remote(*ports: int, **settings) -> RemoteReward:
    given = {"parts": ["content"], "backoff": 0.02, "max_backoff": 0.5, "timeout": 20.0, **settings}
    return RemoteReward(urls=[f"http://127.0.0.1:{port}" for port in ports], **given)


@contextlib.contextmanager
def socket_server(answer: Callable[[socket.socket, int], object]) -> Iterator[int]:
    """Does with every connection what it is told, in a thread; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            for turn in itertools.count():
                answer(listener.accept()[0], turn)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


@contextlib.contextmanager
def thread_server(*rewards: str, token: str = "", limits: ServerLimits | None = None, score=None):
    """Serve toy rewards in a thread; yields the port."""
    specs = [RewardSpec(name=f"toy_rewards:{name}") for name in rewards]
    score = score or composite_scorer(CompositeReward(specs, require_weights=False))
    app = create_app(score, token=token, limits=limits)
    state: RewardServer = app.routes[0].endpoint.__self__
    limits = limits or ServerLimits()
    guard = {"header_timeout": limits.header_timeout_s, "max_connections": limits.max_connections}
    server = uvicorn.Server(server_config(app, **guard, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        STATES[port] = state
        yield port
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def call(port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
