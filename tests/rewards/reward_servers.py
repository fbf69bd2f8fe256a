"""Reward servers for tests: in a thread, or in a process that can be killed."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import uvicorn

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.serving.server import ServerLimits, composite_scorer, create_app
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.web import guarded_config


@contextlib.contextmanager
def thread_server(*rewards: str, token: str = "", limits: ServerLimits | None = None, score=None):
    """Serve toy rewards in a thread; yields the port."""
    specs = [RewardSpec(name=f"toy_rewards:{name}") for name in rewards]
    score = score or composite_scorer(CompositeReward(specs, require_weights=False))
    app = create_app(score, token=token, limits=limits)
    limits = limits or ServerLimits()
    guard = {"header_timeout": limits.header_timeout_s, "max_connections": limits.max_connections}
    server = uvicorn.Server(guarded_config(app, **guard, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def process_server(port: int, reward: str) -> subprocess.Popen:
    """Serve a toy reward in a process of its own, as the command does."""
    code = (
        "from sage_grpo.commands.serve_reward import Options, run, RewardSpec, ServerLimits\n"
        f"run(Options(rewards=[RewardSpec(name='toy_rewards:{reward}')], port={port}, "
        "limits=ServerLimits(max_queue=2000, max_body_mb=1)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)


def call(port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None):
    """One plain HTTP request: status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    """One of the numbers under /metrics."""
    lines = call(port, "GET", "/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"sage_grpo_reward_{name} "))


def wait_until_up(port: int, seconds: float = 60) -> None:
    """Until /health answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if call(port, "GET", "/health")[0] == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the server did not start")
