"""The client of several servers: which one is asked, and which one is left alone."""

from __future__ import annotations

import http.client
import socket
from functools import partial
from urllib.parse import urlsplit

import pytest
import torch
import toy_rewards
from reward_servers import remote, socket_server, thread_server

from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.http_client import RetryOptions
from sage_grpo.rewards.serving import remote as pool_module
from sage_grpo.rewards.serving.remote import RemoteReward, ServerPool
from sage_grpo.rewards.serving.wire import decode_request, encode_response
from sage_grpo.types import PartScores

FPS = 8.0
TEXTS = [f"prompt {index}" for index in range(12)]
CLIPS = torch.randint(0, 256, (12, 3, 4, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


EXPECTED = toy_rewards.content(CLIPS, TEXTS, FPS)
remote = partial(remote, clips_per_request=1)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(pool_module, "time", clock)
    return clock


def servers(count: int) -> ServerPool:
    return ServerPool(
        [urlsplit(f"http://host{index}") for index in range(count)], RetryOptions(backoff=1.0, max_wait=30.0)
    )


def test_a_server_that_fails_is_left_alone_longer_every_time(clock, caplog) -> None:
    pool = servers(2)
    bad, good = pool.servers
    pauses = []
    for _ in range(7):
        clock.now = max(clock.now, bad.down_until)
        assert {id(pool.acquire()), id(pool.acquire())} == {id(bad), id(good)}
        pool.succeeded(good)
        pool.failed(bad, clock.now, "broken")
        pauses.append(bad.down_until - clock.now)
        assert all(pool.acquire() is good for _ in range(5))
        good.open = 0
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert "http://host0 failed (broken): not used for 30 s, failure 7 in a row" in caplog.text
    clock.now = bad.down_until
    assert bad in (pool.acquire(), pool.acquire())
    assert all(pool.acquire() is good for _ in range(5))  # one request to try, not more
    pool.succeeded(bad)
    assert (bad.failures, bad.down_until) == (0, 0.0)


@pytest.mark.parametrize(("hung", "pause"), [(0.5, 1.0), (300.0, 300.0)])
def test_a_server_that_hung_is_left_alone_for_as_long_as_it_cost(hung: float, pause: float, clock) -> None:
    pool = servers(1)
    server, _ = pool.acquire(), pool.acquire()
    clock.now += hung
    pool.failed(server, clock.now - hung, "timed out")
    assert server.down_until == clock.now + pause
    clock.now += 2 * pause
    pool.failed(server, 100.0, "timed out as well")
    assert (server.failures, server.open) == (1, 0)


def test_pauses_are_doubled_up_to_the_longest_and_shortened_by_chance_to_a_half() -> None:
    pauses = RetryOptions(backoff=0.5, max_wait=3.0)
    assert [pauses.longest_pause(tries) for tries in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    found = [pauses.pause(2) for _ in range(200)]
    assert 1.0 <= min(found) < 1.2 < 1.8 < max(found) <= 2.0


def test_the_server_with_the_fewest_open_requests_is_asked_and_a_busy_one_rests(clock) -> None:
    pool = servers(2)
    first, second = pool.acquire(), pool.acquire()
    assert {first, second} == set(pool.servers)
    pool.succeeded(second)
    assert pool.acquire() is second
    pool.busy(first)
    assert [pool.acquire() for _ in range(3)] == [second] * 3
    assert first.failures == 0
    clock.now += 1.0
    assert pool.acquire() is first
    assert pool.acquire([second]) is first
    assert pool.acquire([first, second]) is None


def test_a_hanging_server_costs_one_time_out_and_an_error_waits_for_none(caplog) -> None:
    """A request that hangs is tried at the other server. After a wrong configuration the open connections are cut: the time-out is longer than this test may take."""
    taken: list[socket.socket] = []
    with socket_server(lambda connection, _: taken.append(connection)) as hung, thread_server("content") as good:
        client = remote(hung, good, timeout=0.5, parallel=4, max_backoff=60.0)
        for _ in range(2):
            assert torch.equal(client(CLIPS, TEXTS, FPS)["content"], EXPECTED)
        assert 1 <= len(taken) <= 2  # in the first call; then it was left alone
        assert f"http://127.0.0.1:{hung} failed (TimeoutError" in caplog.text
        with pytest.raises(RewardConfigError, match="no part 'other'"):
            remote(hung, good, parts=["other"], timeout=3600.0)(CLIPS, TEXTS, FPS)
    for sock in taken:
        with sock:
            sock.settimeout(20)
            while sock.recv(65536):
                pass  # the client has cut the connection: a server can stop its work


@pytest.mark.parametrize(("status", "tries", "failures"), [(500, 1, 1), (503, 3, 0), (429, 3, 0)])
def test_what_the_only_server_refuses_is_not_sent_again(status: int, tries: int, failures: int, monkeypatch) -> None:
    sent: list[str] = []
    paused: list[int] = []
    monkeypatch.setattr(RetryOptions, "pause", lambda self, attempt: paused.append(attempt) or 0.0)
    monkeypatch.setattr(pool_module, "post", lambda *given, **settings: sent.append("") or (status, {}, b"no"))
    client = remote(1, retries=2, backoff=1e-3)
    assert len(client(CLIPS[:1], TEXTS[:1], FPS).reasons) == 1
    assert len(sent) == tries
    assert paused == list(range(len(paused))), "the first is the shortest"
    assert client._pool.servers[0].failures == failures, "a busy server works"


@pytest.mark.parametrize(("timeout", "waited"), [(300.0, 10.0), (3.0, 3.0)])
def test_a_machine_that_is_gone_costs_ten_seconds_at_most(timeout: float, waited: float, monkeypatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout, *more: seen.append(timeout) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remote(1, timeout=timeout)(CLIPS[:1], TEXTS[:1], FPS)
    assert seen == [waited]


def raises(videos, texts, fps):
    raise SystemExit("no such model")


TOKEN = "sk-0123456789-secret"


@pytest.fixture
def echoing(monkeypatch: pytest.MonkeyPatch) -> RemoteReward:
    """A reward whose server repeats what it was sent; `answer` is what it says."""
    monkeypatch.setenv("SAGE_GRPO_REWARD_TOKEN", TOKEN)
    reward = remote(1, retries=0)
    module = "sage_grpo.rewards.serving.remote"
    monkeypatch.setattr(f"{module}.post", lambda url, path, body, **settings: reward.answer(body))
    return reward


def asked(reward: RemoteReward) -> list[str]:
    return list(reward(CLIPS[:2], TEXTS[:2], FPS).reasons.values())


def test_a_server_that_repeats_the_token_does_not_get_it_into_logs(echoing, caplog) -> None:
    """Wherever the token stands: a cut would leave half of it."""
    header = f'{{"authorization": "Bearer {TOKEN}"}}'
    for place in (0, 455, 463, 470, 499, 19_955, 19_963):
        echoing.answer = lambda *_, place=place: (500, {}, b"x" * place + header.encode())
        told = [*asked(echoing), caplog.text]
        assert all("answered 500" in reason for reason in told)
        assert not any(TOKEN[:8] in text for text in told), place


def test_errors_reasons_and_names_of_parts_do_not_show_the_token(echoing, caplog) -> None:
    def scored(name: str):
        def answer(body: list) -> tuple[int, dict[str, str], bytes]:
            request = decode_request(b"".join(bytes(piece) for piece in body))
            scores = PartScores({name: torch.full((1,), torch.nan)}, {0: f"you sent {TOKEN}"})
            return 200, {}, encode_response(request.checksum, scores)

        return answer

    echoing.answer = scored("content")
    assert asked(echoing) == ["you sent ***"] * 2
    echoing.answer = scored(f"content {TOKEN}")
    with pytest.raises(RewardConfigError, match="no part 'content'") as refused:
        asked(echoing)
    assert "0123456789" not in str(refused.value)

    def broken(*_: object) -> tuple[int, bytes]:
        raise http.client.BadStatusLine(f"Authorization: Bearer {TOKEN}")

    echoing.answer = broken
    told = [*asked(echoing), caplog.text]
    assert all("BadStatusLine" in reason for reason in told)
    assert not any("0123456789" in text for text in told)


@pytest.mark.parametrize("url", ["http://host:1?key=abc123", "http://me:abc123@host:1", "http://host:1/#abc123"])
def test_an_address_that_holds_more_than_a_place_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"must not hold a key .*variable \(token_env\)|ends with its path") as refused:
        RemoteReward(urls=[url], parts=["content"])
    assert "abc123" not in str(refused.value)
    with pytest.raises(ValueError, match="url looks like http://host:8765, got 'host'"):
        RemoteReward(urls=["host"], parts=["content"])


def test_a_token_in_place_of_its_variable_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("sk-abc123", ""), ("SAGE_GRPO_REWARD_TOKEN", "abc123\nX-Other: 1")):
        monkeypatch.setenv("SAGE_GRPO_REWARD_TOKEN", value)
        with pytest.raises(ValueError) as refused:
            remote(1, token_env=variable)
        assert "abc123" not in str(refused.value)
