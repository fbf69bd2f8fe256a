"""The reward server: right scores under load, failures and attacks, and what it does with clients that hang, leave or send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import toy_rewards
from reward_servers import call, content, metric, remote, socket_server, thread_server

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import PartScores, RewardConfigError
from sage_grpo.rewards.serving import ServerLimits, server
from sage_grpo.rewards.serving.remote import RemoteReward
from sage_grpo.rewards.serving.server import FAILING, Batcher, _Job, check_binding
from sage_grpo.rewards.serving.wire import decode_request, encode_request
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


def test_remote_scores_equal_local_ones_and_requests_are_batched_together():
    sizes = []

    def score(videos, texts, fps):
        sizes.append(len(texts))
        time.sleep(0.02)
        return content(videos, texts, fps)

    videos, texts = clips(20), prompts(20)
    with thread_server(score=score, limits=ServerLimits(max_batch=7, max_wait_ms=30)) as port:
        scores = remote(port, clips_per_request=2, parallel=10)(videos, texts, FPS)
    assert torch.equal(scores["content"], toy_rewards.content(videos, texts, FPS))
    assert max(sizes) <= 7
    assert len(sizes) < 10  # 10 requests came, fewer calls were made
    assert scores.reasons == {}


def test_a_failing_reward_gives_nan_and_its_reason_not_an_error():
    with thread_server("raises_on_bad") as port:
        options = {"urls": [f"http://127.0.0.1:{port}"], "clips_per_request": 2}
        spec = RewardSpec(name="remote", weights={"raises_on_bad": 1.0}, options=options)
        scores, report = CompositeReward([spec]).score(clips(5), ["a", "b", "bad one", "c", "d"], FPS)
        metrics = call(port, "GET", "/metrics")[1].decode()
    assert scores.valid.tolist() == [True, True, False, True, True]
    assert "TimeoutError" in report.failures[0].reason
    assert report.failures[0].prompt == "bad one"
    assert "sage_grpo_reward_clips_failed_total 1" in metrics
    assert 'responses_total{status="200"} 3' in metrics


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
    good = b"".join(encode_request(clips(2), prompts(2), FPS, "id")[0])
    limits = ServerLimits(max_body_mb=1)
    key = {"Authorization": "Bearer s3cret"}
    with thread_server("content", token="s3cret", limits=limits) as port:
        assert call(port, "POST", "/score", good, key)[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert call(port, "POST", "/score", good, headers)[0] == 401
        assert call(port, "GET", "/metrics")[0] == 401
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
        metrics = call(port, "GET", "/metrics", headers=key)[1].decode()
        assert "open_requests 0" in metrics
        assert "received_bytes 0" in metrics


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


def test_a_client_that_leaves_while_its_batch_waits_does_not_stop_the_worker() -> None:
    async def run() -> tuple[list[float], int]:
        batcher = Batcher(lambda videos, *_: PartScores({"x": torch.zeros(len(videos))}), max_batch=8, max_wait=0.05)
        batcher.start()
        request = decode_request(b"".join(encode_request(clips(1), prompts(1), FPS, "id")[0]))
        leaving = asyncio.ensure_future(batcher.submit(request))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.sleep(0.1)  # the batch is over, with nobody in it
        scores = await asyncio.wait_for(batcher.submit(request), 5)
        left, waits = (asyncio.ensure_future(batcher.submit(request)) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        await batcher.close()
        with pytest.raises(server.Closing):
            await waits
        return scores["x"].tolist(), batcher.counters.abandoned

    assert asyncio.run(run()) == ([0.0], 1)


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
    return b"".join(encode_request(videos, list(prompts), 8.0, "id")[0])


def post(data: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.01)


def answered(port: int) -> Counter[str]:
    lines = call(port, "GET", "/metrics")[1].decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("sage_grpo_reward_responses_total{"):
            found[line.split('"')[1][0]] += int(line.split()[1])
    return found


@pytest.mark.parametrize("start", [b"", HEAD[:10], post(body()) + HEAD])
def test_a_connection_without_a_whole_request_is_closed(start: bytes) -> None:
    limits = ServerLimits(header_timeout_s=0.2)
    with thread_server("content", limits=limits) as port, opened(port, start) as sock:
        received(sock)
        assert answered(port)["2"] == (HEAD in start)


@pytest.mark.parametrize("limits", [{"idle_timeout_s": 0.2}, {"read_timeout_s": 0.2}])
def test_a_client_that_pauses_in_its_clips_is_answered_408(limits: dict[str, float]) -> None:
    with thread_server(
        "content", limits=ServerLimits(**{"read_timeout_s": 60, "idle_timeout_s": 60, **limits})
    ) as port:
        with opened(port, HEAD + b"Content-Length: 5000\r\n\r\nabc") as sock:
            assert b" 408 " in sock.recv(65536)
        assert metric(port, "open_requests") == 0


@pytest.mark.parametrize("limit", ["max_connections", "max_queue"])
def test_a_request_that_is_scored_keeps_its_place(limit: str) -> None:
    score = Held()
    with thread_server(score=score, limits=ServerLimits(**{limit: 1})) as port, opened(port, post(body())) as first:
        assert score.started.wait(20)
        with opened(port, post(body())) as second:
            assert b" 503 " in second.recv(65536)
        score.go_on.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200")


def test_clips_of_different_format_or_fps_are_never_mixed_and_a_call_has_a_limit() -> None:
    async def run() -> tuple[list[int], int]:
        batcher, loop = Batcher(lambda *_: PartScores({}), max_batch=4, max_wait=0.0), asyncio.get_running_loop()
        kinds = [(3, 4, 8.0), (1, 4, 8.0), (1, 6, 8.0), (1, 4, 16.0), (2, 4, 8.0), (2, 4, 8.0), (1, 4, 8.0)]
        requests = [encode_request(clips(count, size=size), prompts(count), fps, "id")[0] for count, size, fps in kinds]
        jobs = [_Job(decode_request(b"".join(pieces)), loop.create_future()) for pieces in requests]
        jobs[0].future.cancel()  # its client has gone
        batcher.waiting = list(jobs)
        return [jobs.index(job) for job in batcher._fitting()], batcher.counters.abandoned

    assert asyncio.run(run()) == ([1, 4, 6], 3)


def test_a_refused_body_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(server, "LINGER", 0.1)
    with thread_server("content", token="s3cret") as port:
        for _ in range(2):
            with opened(port, HEAD + b"Content-Length: 60000000\r\n\r\nabc") as sock:
                sock.settimeout(5)
                assert b" 401 " in received(sock)


def test_requests_whose_clients_left_are_not_scored() -> None:
    score, limits = Held(), ServerLimits(max_wait_ms=0, max_batch=4)
    with thread_server(score=score, limits=limits) as port, opened(port, post(body())) as first:
        assert score.started.wait(20)
        leaving = [opened(port, post(body(*"ab"))) for _ in range(6)]
        wait_for(lambda: metric(port, "open_requests") == 7)  # they wait for their turn
        for sock in leaving:
            sock.close()
        with opened(port, post(body(*"abc"))) as last:
            wait_for(lambda: answered(port)["4"] == 6 and metric(port, "open_requests") == 2)
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
