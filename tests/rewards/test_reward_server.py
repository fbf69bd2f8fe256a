"""The reward server: right scores under load, failures and attacks, and what it does with clients that hang, leave or send nonsense."""

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
from reward_servers import STATES, call, content, remote, socket_server, thread_server

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import PartScores, RewardConfigError
from sage_grpo.rewards.serving import ServerLimits, server
from sage_grpo.rewards.serving.remote import RemoteReward
from sage_grpo.rewards.serving.server import FAILING, check_binding
from sage_grpo.rewards.serving.wire import encode_request
from sage_grpo.rewards.spec import RewardSpec

FPS = 8.0


def clips(count: int, seed: int = 0, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size, 3), dtype=torch.uint8, generator=generator)


def prompts(count: int) -> list[str]:
    return [f"prompt {index}" for index in range(count)]


class Held:
    def __init__(self) -> None:
        self.started, self.go_on, self.sizes = threading.Event(), threading.Event(), []

    def __call__(self, videos, texts, fps) -> PartScores:
        self.sizes.append(len(texts))
        self.started.set()
        assert self.go_on.wait(20)
        return content(videos, texts, fps)


def test_remote_scores_equal_local_ones():
    videos, texts = clips(20), prompts(20)
    with thread_server("content") as port:
        scores = remote(port, clips_per_request=2, parallel=10)(videos, texts, FPS)
    assert torch.equal(scores["content"], toy_rewards.content(videos, texts, FPS))
    assert scores.reasons == {}


def test_a_failing_reward_gives_nan_and_its_reason_not_an_error():
    with thread_server("raises_on_bad") as port:
        options = {"urls": [f"http://127.0.0.1:{port}"], "clips_per_request": 2}
        spec = RewardSpec(name="remote", weights={"raises_on_bad": 1.0}, options=options)
        scores, report = CompositeReward([spec]).score(clips(5), ["a", "b", "bad one", "c", "d"], FPS)
    assert scores.valid.tolist() == [True, True, False, True, True]
    assert "TimeoutError" in report.failures[0].reason
    assert report.failures[0].prompt == "bad one"


def opened(port: int, payload: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(payload)
    return sock


def received(sock: socket.socket) -> bytes:
    """What comes until the server closes; a server that does not is a time-out."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            got += chunk
    return got


def raw(port: int, payload: bytes, *, close: bool = False) -> bytes:
    with opened(port, payload) as sock:
        if close:
            sock.shutdown(socket.SHUT_WR)
        return received(sock)


def test_malformed_oversized_truncated_and_unauthorised_payloads(monkeypatch):
    good = b"".join(encode_request(clips(2), prompts(2), FPS)[0])
    limits = ServerLimits(max_body_mb=1)
    key = {"Authorization": "Bearer s3cret"}
    with thread_server("content", token="s3cret", limits=limits) as port:
        assert call(port, "POST", "/score", good, key)[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert call(port, "POST", "/score", good, headers)[0] == 401
        for body in (b"", b"x" * 100, good[:-1], good[:50], good + b"x", b"\x80\x04K\x01."):
            assert call(port, "POST", "/score", body, key)[0] == 400
        assert call(port, "POST", "/score", bytes(3 * 2**20), key)[0] == 413
        head = b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n"
        assert b" 413 " in raw(port, head + b"Content-Length: 9999999999\r\n\r\nabc")
        chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
        assert b" 413 " in raw(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + 20 * chunk + b"0\r\n\r\n")
        raw(port, head + b"Content-Length: 5000\r\n\r\nabc", close=True)  # breaks off
        assert call(port, "GET", "/score")[0] == 405
        assert call(port, "GET", "/health")[0] == 200
        monkeypatch.setenv("SAGE_GRPO_REWARD_TOKEN", "s3cret\n")
        scores = remote(port)(clips(3), prompts(3), FPS)
        assert torch.equal(scores["content"], toy_rewards.content(clips(3), prompts(3), FPS))
        monkeypatch.setenv("SAGE_GRPO_REWARD_TOKEN", "other")
        refused = remote(port)(clips(3), prompts(3), FPS)
        assert refused["content"].isnan().all()
        assert "401" in refused.reasons[0]
        assert (STATES[port].open, STATES[port].bytes) == (0, 0)


def test_a_lying_server_never_gives_a_score():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: "
    kinds = [b"garbage", b"", head + b"500\r\n\r\nshort", head + b"10\r\n\r\n0123456789"]

    def lie(connection: socket.socket, turn: int) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**20)
            connection.sendall(kinds[turn % len(kinds)])

    with socket_server(lie) as liar, thread_server("content") as good:
        scores = remote(liar, retries=4)(clips(2), prompts(2), FPS)
        assert scores["content"].isnan().all()
        both = remote(liar, good, retries=8, clips_per_request=1)(clips(6), prompts(6), FPS)
        assert torch.equal(both["content"], toy_rewards.content(clips(6), prompts(6), FPS))


def test_a_server_that_stops_finishes_what_it_has():
    result, score = {}, Held()
    with thread_server(score=score) as port:
        client = remote(port, retries=0)
        thread = threading.Thread(target=lambda: result.update(client(clips(2), prompts(2), FPS)))
        thread.start()
        assert score.started.wait(20)
        threading.Timer(0.2, score.go_on.set).start()
    thread.join()
    assert torch.equal(result["content"], toy_rewards.content(clips(2), prompts(2), FPS))


def test_binding_to_other_machines_needs_a_token():
    for host in ("127.9.9.9", "::1", "localhost"):
        check_binding(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org"):
        with pytest.raises(RewardConfigError, match="token"):
            check_binding(host, "")
        check_binding(host, "token")


@pytest.mark.parametrize("options", [{"urls": []}, {"parts": []}, {"timeout": 0.0}, {"retries": -1}])
def test_wrong_client_settings_are_refused(options):
    with pytest.raises(RewardConfigError):
        RemoteReward(**{"urls": ["http://host"], "parts": ["x"], **options})


HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\n"


def body(*prompts: str) -> bytes:
    prompts = prompts or ("a",)
    videos = torch.arange(len(prompts) * 12, dtype=torch.uint8).view(-1, 1, 2, 2, 3)
    return b"".join(encode_request(videos, list(prompts), 8.0)[0])


def post(data: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.01)


@pytest.mark.parametrize("start", [b"", HEAD[:10], post(body()) + HEAD])
def test_a_connection_without_a_whole_request_is_closed(start: bytes) -> None:
    limits = ServerLimits(header_timeout_s=0.2)
    with thread_server("content", limits=limits) as port, opened(port, start) as sock:
        assert (b" 200 " in received(sock)) == (HEAD in start)


@pytest.mark.parametrize("limits", [{"idle_timeout_s": 0.2}, {"read_timeout_s": 0.2}])
def test_a_client_that_pauses_in_its_clips_is_answered_408(limits: dict[str, float]) -> None:
    with thread_server(
        "content", limits=ServerLimits(**{"read_timeout_s": 60, "idle_timeout_s": 60, **limits})
    ) as port:
        with opened(port, HEAD + b"Content-Length: 5000\r\n\r\nabc") as sock:
            assert b" 408 " in sock.recv(65536)
        assert STATES[port].open == 0


@pytest.mark.parametrize("limit", ["max_connections", "max_queue"])
def test_a_request_that_is_scored_keeps_its_place(limit: str) -> None:
    score = Held()
    with thread_server(score=score, limits=ServerLimits(**{limit: 1})) as port, opened(port, post(body())) as first:
        assert score.started.wait(20)
        with opened(port, post(body())) as second:
            assert b" 503 " in second.recv(65536)
        score.go_on.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_refused_body_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(server, "LINGER", 0.1)
    with thread_server("content", token="s3cret") as port:
        for _ in range(2):
            with opened(port, HEAD + b"Content-Length: 60000000\r\n\r\nabc") as sock:
                sock.settimeout(5)
                assert b" 401 " in received(sock)


def test_requests_whose_clients_left_are_not_scored() -> None:
    score = Held()
    with thread_server(score=score) as port, opened(port, post(body())) as first:
        assert score.started.wait(20)
        leaving = [opened(port, post(body(*"ab"))) for _ in range(6)]
        wait_for(lambda: STATES[port].open == 7)  # they wait for their turn
        for sock in leaving:
            sock.close()
        wait_for(lambda: STATES[port].open == 1)
        with opened(port, post(body(*"abc"))) as last:
            wait_for(lambda: STATES[port].open == 2)
            score.go_on.set()
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            assert last.recv(65536).startswith(b"HTTP/1.1 200")
    assert score.sizes == [1, 3]


def test_health_fails_after_calls_in_a_row_without_a_score() -> None:
    def health(port: int) -> tuple[int, str]:
        status, text = call(port, "GET", "/health")
        return status, json.loads(text)["status"]

    with thread_server("raises_on_bad") as port:
        assert health(port) == (200, "ok")
        for prompt, state in (
            *[("bad", (200, "ok"))] * (FAILING - 1),
            *[("bad", (503, "failing"))] * 2,
            ("a", (200, "ok")),
        ):
            call(port, "POST", "/score", body(prompt))
            assert health(port) == state
        call(port, "POST", "/score", body("a", "bad"))
        assert health(port) == (200, "ok")
