"""What the server does with clients that hang, leave or send nonsense, and what it says about itself."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
import toy_rewards
from reward_servers import call, thread_server

from sage_grpo.rewards.functions import PartScores
from sage_grpo.rewards.serving import server
from sage_grpo.rewards.serving.server import ServerLimits
from sage_grpo.rewards.serving.wire import encode_request

HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\n"


def body(count: int = 1) -> bytes:
    videos = torch.arange(count * 12, dtype=torch.uint8).view(count, 1, 2, 2, 3)
    return b"".join(encode_request(videos, ["a"] * count, 8.0, "id")[0])


def post(data: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def opened(port: int, payload: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(payload)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Waits for the server to close; a server that does not is a time-out."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


def metric(port: int, name: str) -> float:
    lines = call(port, "GET", "/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"sage_grpo_reward_{name} "))


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; goes on after a while, so that a test fails instead of hanging."""
    for _ in range(300):
        if condition():
            return
        time.sleep(0.01)


def answered(port: int) -> dict[str, int]:
    """How many answers the server gave, by kind."""
    counts = {"2xx": 0, "4xx": 0}
    for line in call(port, "GET", "/metrics")[1].decode().splitlines():
        if line.startswith("sage_grpo_reward_responses_total{"):
            counts[line.split('"')[1][0] + "xx"] += int(line.split()[1])
    return counts


@pytest.mark.parametrize("start", [b"", HEAD, HEAD + b"Content-Length: 5000\r\n\r\nabc"])
def test_connections_that_send_nothing_do_not_keep_others_out(start: bytes) -> None:
    """More of them than the server takes: silent, with half a header, with half a body; nobody waits for their time-out."""
    limits = ServerLimits(max_connections=20, max_queue=10, header_timeout_s=60, idle_timeout_s=60)
    with thread_server("content", limits=limits) as port, contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(opened(port, start))
        for _ in range(3):
            assert call(port, "POST", "/score", body())[0] == 200


@pytest.mark.parametrize("start", [b"", HEAD[:10], HEAD + b"X-A: b\r\n"])
def test_a_connection_without_a_request_is_closed(start: bytes) -> None:
    limits = ServerLimits(header_timeout_s=0.2)
    with thread_server("content", limits=limits) as port, opened(port, start) as sock:
        assert is_closed(sock)


def test_half_a_second_request_on_an_open_connection_is_closed_too() -> None:
    limits = ServerLimits(header_timeout_s=0.2)
    with thread_server("content", limits=limits) as port, opened(port, post(body())) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(HEAD)
        assert is_closed(sock)


def test_a_client_that_pauses_in_its_clips_is_answered_408() -> None:
    limits = ServerLimits(idle_timeout_s=0.2, read_timeout_s=60)
    with thread_server("content", limits=limits) as port:
        with opened(port, HEAD + b"Content-Length: 5000\r\n\r\nabc") as sock:
            assert b" 408 " in sock.recv(65536)
        assert metric(port, "open_requests") == 0


def test_a_request_that_is_scored_keeps_its_place() -> None:
    """At the limit, only connections without a whole request make room."""
    started, go_on = threading.Event(), threading.Event()

    def score(videos, texts, fps):
        started.set()
        assert go_on.wait(20)
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    limits = ServerLimits(max_connections=1)
    with thread_server(score=score, limits=limits) as port, opened(port, post(body())) as first:
        assert started.wait(20)
        with opened(port) as second:
            assert b" 503 " in second.recv(65536)
        go_on.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_refused_body_is_not_waited_for(monkeypatch) -> None:
    """The answer comes while the body still stands out, and then the connection ends whether or not more of it comes."""
    monkeypatch.setattr(server, "LINGER", 0.1)
    with thread_server("content", token="s3cret") as port:
        for _ in range(2):
            with opened(port, HEAD + b"Content-Length: 60000000\r\n\r\nabc") as sock:
                sock.settimeout(5)
                assert b" 401 " in sock.recv(65536)
                assert is_closed(sock)


def test_requests_whose_clients_left_are_not_scored() -> None:
    started, go_on = threading.Event(), threading.Event()
    scored = []

    def score(videos, texts, fps):
        scored.append(len(texts))
        started.set()
        assert go_on.wait(20)
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    limits = ServerLimits(max_wait_ms=0, max_batch=4)
    with thread_server(score=score, limits=limits) as port, opened(port, post(body())) as first:
        assert started.wait(20)
        leaving = [opened(port, post(body(2))) for _ in range(6)]
        wait_for(lambda: metric(port, "open_requests") == 7)  # they wait for their turn
        for sock in leaving:
            sock.close()
        with opened(port, post(body(3))) as last:
            wait_for(lambda: answered(port) == {"2xx": 0, "4xx": 6} and metric(port, "open_requests") == 2)
            go_on.set()
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            assert last.recv(65536).startswith(b"HTTP/1.1 200")
    assert scored == [1, 3]


def test_health_tells_how_the_last_scoring_went() -> None:
    broken = threading.Event()

    def score(videos, texts, fps):
        if broken.is_set():
            raise ValueError("the model is gone")
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    def health(port: int) -> tuple[int, str, int]:
        status, text = call(port, "GET", "/health")
        content = json.loads(text)
        assert "gone" not in text.decode()  # health is open to all
        return status, content["status"], content["last_failed"]

    with thread_server(score=score) as port:
        assert health(port) == (200, "ok", 0)
        broken.set()
        call(port, "POST", "/score", body(2))
        assert health(port) == (503, "failing", 2)
        broken.clear()
        call(port, "POST", "/score", body(2))
        assert health(port) == (200, "ok", 0)


def test_health_minds_clips_without_a_score_but_not_a_few() -> None:
    with thread_server("nan_on_bad") as port:
        videos = torch.zeros(2, 1, 2, 2, 3, dtype=torch.uint8)
        for prompts, status in ((["a", "bad"], 200), (["bad", "bad inf"], 503), (["a", "b"], 200)):
            call(port, "POST", "/score", b"".join(encode_request(videos, prompts, 8.0, "id")[0]))
            assert call(port, "GET", "/health")[0] == status
