"""How often the study's server may be asked: by raters, who get on again after a moment, and by guessers, who do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_grpo.tools.study.app import Buckets, Refused, StudyServer
from sage_grpo.tools.study.making import invite
from sage_grpo.tools.study.store import Store
from studies import created, study

BURST = 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr("sage_grpo.tools.study.app.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(created(tmp_path / "study.sqlite", study(prompts=1, methods=2))) as opened:
        yield opened


def test_a_bucket_fills_again_at_its_rate_and_no_further_than_its_brim(clock: list[float]) -> None:
    buckets = Buckets(rate=0.5, burst=BURST)
    assert [buckets.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert buckets.take("b")  # others have their own
    clock[0] += 1.5
    assert not buckets.take("a")
    clock[0] += 0.5  # two seconds are one request, also when it was asked for in between
    assert [buckets.take("a") for _ in range(2)] == [True, False]
    clock[0] += 1000
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]


def test_of_many_names_the_oldest_is_forgotten_and_not_the_newest(clock: list[float]) -> None:
    buckets = Buckets(rate=0.001, burst=1, most=2)
    assert [buckets.take(name) for name in "abac"] == [True, True, False, True]  # b was used longest ago
    assert not buckets.take("a")
    assert buckets.take("b")


def request(name: str = "", token: str = "", host: str = "1.2.3.4") -> Any:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return SimpleNamespace(
        path_params={"name": name}, headers=headers, client=SimpleNamespace(host=host), query_params={}
    )


def statuses(call: Any, requests: list[Any]) -> list[int]:
    found = []
    for one in requests:
        try:
            found.append(asyncio.run(call(one)).status_code)
        except Refused as refused:
            found.append(refused.status)
    return found


@pytest.mark.parametrize("what", ["clip", "results"])
def test_whoever_guesses_is_stopped_after_a_few_and_gets_on_slowly(what: str, store: Store, tmp_path, clock) -> None:
    server = StudyServer(store, tmp_path, rate=0.5, burst=BURST)
    wrong = 404 if what == "clip" else 401
    guesses = [request(name=f"{number:022d}", token=f"{number:043d}") for number in range(5)]
    assert statuses(getattr(server, what), guesses) == [wrong, wrong, wrong, 429, 429]
    assert statuses(getattr(server, what), [request("x" * 22, "x" * 43, host="5.6.7.8")]) == [wrong]  # another address
    clock[0] += 2
    assert statuses(getattr(server, what), guesses[:2]) == [wrong, 429]
    if what == "clip":
        assert statuses(server.clip, [request("..", host="9.9.9.9")] * 4) == [404, 404, 404, 429], "no name at all"


def test_videos_that_are_there_are_not_rationed_and_raters_behind_a_guessers_address_go_on(
    store: Store, tmp_path: Path, clock: list[float]
) -> None:
    rater, token = invite(store)
    asked = store.ask(rater)[0]
    file = store.clip(asked.left)
    assert file is not None
    (tmp_path / file).write_bytes(b"video")
    server = StudyServer(store, tmp_path, rate=0.5, burst=BURST)
    assert statuses(server.clip, [request("x" * 22)] * 4)[-1] == 429
    assert statuses(server.clip, [request(asked.left)] * 6) == [200] * 6
    assert statuses(server.task, [request(token=token)] * 4) == [200, 200, 200, 429]
    clock[0] += 2
    assert statuses(server.task, [request(token=token)]) == [200]
