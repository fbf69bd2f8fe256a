"""The reward server and its client: right scores under load, failures and attacks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time

import pytest
import torch
import toy_rewards
from reward_servers import call, process_server, thread_server, wait_until_up

import needs
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import PartScores, RewardConfigError
from sage_grpo.rewards.serving.remote import RemoteReward
from sage_grpo.rewards.serving.server import Batcher, ServerLimits, check_binding
from sage_grpo.rewards.serving.wire import decode_request, encode_request
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.web import is_loopback

FPS = 8.0


def clips(count: int, seed: int = 0, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size, 3), dtype=torch.uint8, generator=generator)


def prompts(count: int) -> list[str]:
    return [f"prompt {index}" for index in range(count)]


def remote(*ports: int, **kwargs) -> RemoteReward:
    settings = {"parts": ["content"], "backoff": 0.02, "max_backoff": 0.5, "timeout": 20.0, **kwargs}
    return RemoteReward(urls=[f"http://127.0.0.1:{port}" for port in ports], **settings)


def test_remote_scores_equal_local_ones_and_requests_are_batched_together():
    sizes = []

    def score(videos, texts, fps):
        sizes.append(len(texts))
        time.sleep(0.02)
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    videos, texts = clips(40), prompts(40)
    with thread_server(score=score, limits=ServerLimits(max_batch=7, max_wait_ms=30)) as port:
        scores = remote(port, clips_per_request=2, parallel=20)(videos, texts, FPS)
    assert torch.equal(scores["content"], toy_rewards.content(videos, texts, FPS))
    assert max(sizes) <= 7
    assert len(sizes) < 20  # 20 requests came, fewer calls were made
    assert scores.reasons == {}


def test_clips_of_different_format_or_fps_are_never_mixed():
    seen = []

    def score(videos, texts, fps):
        seen.append((videos.shape[2], fps))
        time.sleep(0.01)
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    results = {}

    def client(port: int, size: int, fps: float) -> None:
        videos = clips(12, seed=size, size=size)
        ours = remote(port, clips_per_request=1, parallel=4)(videos, prompts(12), fps)["content"]
        results[size, fps] = torch.equal(ours, toy_rewards.content(videos, prompts(12), fps))

    with thread_server(score=score, limits=ServerLimits(max_wait_ms=20)) as port:
        threads = [threading.Thread(target=client, args=(port, s, f)) for s in (4, 6) for f in (8.0, 16.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == dict.fromkeys([(4, 8.0), (4, 16.0), (6, 8.0), (6, 16.0)], True)
    assert set(seen) == set(results)


def test_a_failing_reward_gives_nan_and_its_reason_not_an_error():
    with thread_server("raises_on_bad") as port:
        spec = RewardSpec(
            name="remote",
            weights={"raises_on_bad": 1.0},
            options={"urls": [f"http://127.0.0.1:{port}"], "clips_per_request": 2},
        )
        scores, report = CompositeReward([spec]).score(clips(5), ["a", "b", "bad one", "c", "d"], FPS)
        metrics = call(port, "GET", "/metrics")[1].decode()
    assert scores.valid.tolist() == [True, True, False, True, True]
    assert "KeyError" in report.failures[0].reason
    assert report.failures[0].prompt == "bad one"
    assert "sage_grpo_reward_clips_failed_total 1" in metrics
    assert 'responses_total{status="200"} 3' in metrics


def test_a_broken_configuration_is_answered_500_and_the_server_lives():
    def score(videos, texts, fps):
        raise SystemExit("a library wants to leave")

    with thread_server(score=score) as port:
        scores = remote(port)(clips(1), prompts(1), FPS)
        assert scores["content"].isnan().all()
        assert "500" in scores.reasons[0]
        assert call(port, "GET", "/metrics")[0] == 200
        assert call(port, "GET", "/health")[0] == 503


def raw(port: int, payload: bytes, *, close: bool = False) -> bytes:
    """Send bytes as they are, perhaps close our side, and read what comes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(payload)
        if close:
            sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(65536):
                received += chunk
        return received


def test_malformed_oversized_truncated_and_unauthorised_payloads(monkeypatch):
    good = b"".join(encode_request(clips(2), prompts(2), FPS, "id")[0])
    limits = ServerLimits(max_body_mb=1, read_timeout_s=1.0)
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
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(head + b"Content-Length: 5000\r\n\r\nabc")  # never goes on
            assert b" 408 " in slow.recv(65536)
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


def test_a_full_queue_is_answered_503_and_retried_until_all_are_scored():
    with thread_server("slow_content", limits=ServerLimits(max_queue=3, max_batch=2)) as port:
        client = remote(port, parts=["slow_content"], clips_per_request=1, parallel=30, retries=40)
        scores = client(clips(30), prompts(30), FPS)
        metrics = call(port, "GET", "/metrics")[1].decode()
    assert torch.equal(scores["slow_content"], toy_rewards.content(clips(30), prompts(30), FPS))
    assert 'status="503"' in metrics


def test_load_is_balanced_and_a_dead_server_is_left_alone():
    dead = needs.free_port()
    with thread_server("content") as first, thread_server("content") as second:
        client = remote(first, dead, second, clips_per_request=1, parallel=2)
        scores = client(clips(30), prompts(30), FPS)["content"]
        counts = []
        for port in (first, second):
            lines = call(port, "GET", "/metrics")[1].decode().splitlines()
            counts += [int(line.split()[1]) for line in lines if line.startswith("sage_grpo_reward_clips_total")]
    assert torch.equal(scores, toy_rewards.content(clips(30), prompts(30), FPS))
    assert sum(counts) == 30
    assert min(counts) >= 5


def test_no_server_at_all_marks_the_clips_and_training_can_stop_or_go_on():
    client = remote(needs.free_port(), retries=2)
    scores = client(clips(3), prompts(3), FPS)
    assert scores["content"].isnan().all()
    assert "ConnectionRefusedError" in scores.reasons[2]


def wrong_answers(port_holder: list[int], stop: threading.Event) -> None:
    """A server that answers every request with another request's answer, truncated answers, or garbage."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    port_holder.append(listener.getsockname()[1])
    kinds = [b"garbage", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort"]
    kinds.append(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789")
    turn = 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError, OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError, OSError):
                    connection.recv(2**20)
                connection.sendall(kinds[turn % len(kinds)])
                turn += 1
    listener.close()


def test_a_lying_server_never_gives_a_score():
    ports: list[int] = []
    stop = threading.Event()
    thread = threading.Thread(target=wrong_answers, args=(ports, stop))
    thread.start()
    try:
        while not ports:
            time.sleep(0.01)
        scores = remote(ports[0], retries=4)(clips(2), prompts(2), FPS)
        assert scores["content"].isnan().all()
        with thread_server("content") as good:
            both = remote(ports[0], good, retries=8, clips_per_request=1)(clips(6), prompts(6), FPS)
        assert torch.equal(both["content"], toy_rewards.content(clips(6), prompts(6), FPS))
    finally:
        stop.set()
        thread.join()


def hostile(port: int, stop: threading.Event, statuses: set[bytes]) -> None:
    """Malformed, truncated, oversized, unauthorised and broken requests for as long as the test runs."""
    good = b"".join(encode_request(clips(1), prompts(1), FPS, "id")[0])
    open_head = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head = open_head + b"Authorization: Bearer s3cret\r\n"
    attacks = [(head, body) for body in (b"x" * 64, good[: len(good) // 2], good[:-1] + b"?", bytes(2**20 + 1))]
    attacks += [(open_head, good), (open_head + b"Authorization: Bearer guess\r\n", good)]
    while not stop.is_set():
        for start, body in attacks:
            with contextlib.suppress(OSError):
                answer = raw(port, start + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                statuses.add(answer[9:12])
            with contextlib.suppress(OSError):
                raw(port, start + b"Content-Length: 99999\r\n\r\n" + body[:500], close=True)
            stop.wait(0.02)


@pytest.mark.slow
def test_a_thousand_concurrent_requests_while_the_server_is_killed_and_attacked(monkeypatch):
    monkeypatch.setenv("SAGE_GRPO_REWARD_TOKEN", "s3cret")
    port = needs.free_port()
    videos, texts = clips(1000), prompts(1000)
    expected = toy_rewards.content(videos, texts, FPS)
    client = remote(
        port, parts=["slow_content"], clips_per_request=1, parallel=1000, retries=60, max_backoff=1.0, timeout=30.0
    )
    server = process_server(port, "slow_content")
    stop, result, interrupted = threading.Event(), {}, 0
    statuses: set[bytes] = set()
    threads = [threading.Thread(target=hostile, args=(port, stop, statuses))]
    threads.append(threading.Thread(target=lambda: result.update(client(videos, texts, FPS))))
    try:
        wait_until_up(port)
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(random.uniform(0.1, 0.5))
            server.kill()
            server.wait()
            interrupted += threads[1].is_alive()
            server = process_server(port, "slow_content")
            wait_until_up(port)
        threads[1].join(timeout=120)
        assert not threads[1].is_alive()
        stop.set()
        threads[0].join(timeout=30)
        assert call(port, "GET", "/health")[0] == 200
    finally:
        stop.set()
        server.terminate()
        server.wait(timeout=30)
    assert statuses - {b""} == {b"400", b"401", b"413"}  # no attack was ever answered with a score
    assert interrupted  # work was in flight when the server died
    scores = result["slow_content"]
    finite = scores.isfinite()
    assert torch.equal(scores[finite], expected[finite])  # never a wrong score
    assert finite.all()  # and everything was scored once the server was back


def test_a_server_that_stops_finishes_what_it_has():
    started = threading.Event()

    def score(videos, texts, fps):
        started.set()
        time.sleep(0.3)
        return PartScores({"content": toy_rewards.content(videos, texts, fps)})

    result = {}
    with thread_server(score=score) as port:
        client = remote(port, retries=0)
        thread = threading.Thread(target=lambda: result.update(client(clips(2), prompts(2), FPS)))
        thread.start()
        assert started.wait(20)
    thread.join()
    assert torch.equal(result["content"], toy_rewards.content(clips(2), prompts(2), FPS))


def test_binding_to_other_machines_needs_a_token():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
        check_binding(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org"):
        with pytest.raises(RewardConfigError, match="token"):
            check_binding(host, "")
        check_binding(host, "token")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "at least one url"),
        ({"urls": ["host:80"]}, "looks like"),
        ({"urls": ["http://user:pw@host"]}, "must not hold a key"),
        ({"urls": ["http://host"], "parts": []}, "weights"),
        ({"urls": ["http://host"], "timeout": 0.0}, "timeout must be positive, got 0"),
        ({"urls": ["http://host"], "timeout": float("nan")}, "timeout must be positive, got nan"),
        ({"urls": ["http://host"], "retries": -1}, "retries must be at least 0, got -1"),
        ({"urls": ["http://host"], "backoff": float("inf")}, "backoff must be at least 0, got inf"),
    ],
)
def test_wrong_client_settings_are_refused(options, message):
    with pytest.raises(RewardConfigError, match=message):
        RemoteReward(**{"parts": ["x"], **options})


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
        await batcher.close()
        return scores["x"].tolist(), batcher.counters.abandoned

    assert asyncio.run(run()) == ([0.0], 1)
