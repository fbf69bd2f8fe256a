"""The study's server against raters in a hurry, forgers and guessers."""

from __future__ import annotations

import csv
import io
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sage_grpo.study.app import HEADERS
from studies import Server, ask, call, serving, small_study, vote_for

RATERS = 50
SECRETS = (b"sage", b"flow", b"base", b"spoilt", b"degraded", b"same", b"clip.mp4")
GUARDS = {name.lower() for name in HEADERS}


class Running(NamedTuple):
    """A study that is being served."""

    server: Server
    study: Path
    admin: str
    tokens: list[str]

    @property
    def port(self) -> int:
        return self.server.port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    study, admin, tokens = small_study(tmp_path_factory.mktemp("study"), prompts=3, raters=RATERS + 3, checks=0.1)
    with serving(study) as server:
        yield Running(server, study, admin, tokens)


def rows_of(running: Running) -> list[dict[str, str]]:
    body = call(running.port, "GET", "/api/votes.csv", token=running.admin)[1]
    return list(csv.DictReader(io.StringIO(body.decode())))


@pytest.mark.slow
def test_fifty_raters_at_once_lose_and_double_nothing(running: Running) -> None:
    """Every vote is sent by two connections at a time, as an impatient page would."""
    chosen: list[dict[str, str]] = [{} for _ in range(RATERS)]
    faults: list[Any] = []

    def rate(number: int) -> None:
        token, state = running.tokens[number], ask(running.port, running.tokens[number])
        while state["task"]:
            answer = ("left", "tie", "right")[(number + state["done"]) % 3]
            vote = vote_for(state, answer, nonce=f"{number:016x}{state['done']:016x}")
            chosen[number][str(state["done"] + 1)] = answer
            replies: list[tuple[int, bytes]] = []

            def send(vote: Any = vote, replies: list[Any] = replies) -> None:
                replies.append(call(running.port, "POST", "/api/vote", token=token, body=vote)[:2])

            other = threading.Thread(target=send)
            other.start()
            send()
            other.join()
            if [status for status, _ in replies] != [200, 200]:
                return faults.append(replies)
            state = json.loads(replies[0][1])

    threads = [threading.Thread(target=rate, args=(number,)) for number in range(RATERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    rows = [row for row in rows_of(running) if int(row["rater"]) <= RATERS]
    assert len(rows) == RATERS * 10 * 3
    assert max(Counter((row["rater"], row["place"], row["dimension"]) for row in rows).values()) == 1
    assert all(chosen[int(row["rater"]) - 1][row["place"]] == row["answer"] for row in rows)


def test_the_raters_page_never_hears_of_methods_or_checks(running: Running) -> None:
    token = running.tokens[RATERS]
    for _ in range(10):
        status, body, _ = call(running.port, "GET", "/api/task", token=token)
        state = json.loads(body)
        names = [state["task"]["left"], state["task"]["right"], state["task"]["name"], *state["next"]]
        assert len(set(names)) == len(names)  # also where a clip is compared with itself
        assert state["task"].keys() == {"name", "prompt", "left", "right"}
        heads = [call(running.port, "GET", f"/clip/{name}")[2] for name in names[:2]]
        own = [{key: value for key, value in head.items() if key not in GUARDS} for head in heads]
        told = body + json.dumps(own).encode()
        assert not [word for word in SECRETS if word in told]
        assert heads[0]["last-modified"] == heads[1]["last-modified"]
        vote = vote_for(state, nonce=f"{state['done']:032x}".replace("0", "b"))
        status, _, _ = call(running.port, "POST", "/api/vote", token=token, body=vote)
        assert status == 200
    assert ask(running.port, token)["task"] is None


def test_malformed_replayed_and_forged_votes_change_nothing(running: Running) -> None:
    token, other, port = running.tokens[RATERS + 1], running.tokens[RATERS + 2], running.port
    state, before = ask(port, token), len(rows_of(running))
    good = vote_for(state, nonce="a" * 32)
    theirs = vote_for(ask(port, other), nonce="c" * 32)
    answers = good["answers"]
    bad: list[tuple[int, Any]] = [
        (400, b""), (400, b"{"), (400, b"\xff\xfe"), (400, b"[" * 4000), (400, []), (400, {}), (400, {**good, "rater": 1}),
        (400, {**good, "nonce": "short"}), (400, {**good, "nonce": 7}), (400, {**good, "nonce": "A" * 32}),
        (400, {**good, "task": None}), (400, {**good, "task": "../../study.sqlite"}), (400, {**good, "task": "' OR 1=1 --"}),
        (400, {**good, "answers": {}}), (400, {**good, "answers": [1]}), (400, {**good, "answers": {**answers, "more": "tie"}}),
        (400, {**good, "answers": {**answers, "visual quality": "best"}}),
        (400, {**good, "answers": {**answers, "visual quality": ["left"]}}),
        (400, {**good, "answers": {**answers, "visual quality": None}}),
        (404, {**good, "task": "x" * 22}), (404, {**good, "task": theirs["task"]}), (413, b'{"a": "' + b"x" * 5000 + b'"}'),
    ]  # fmt: skip
    for status, body in bad:
        found, text, _ = call(port, "POST", "/api/vote", token=token, body=body)
        assert found == status, (body, text)
    for type_ in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ):  # what a foreign page could send
        assert call(port, "POST", "/api/vote", token=token, body=good, Content_Type=type_)[0] == 415
    for wrong in ("", "x", "x" * 43, running.admin, other[:-1], token + "x"):
        header = {"Authorization": f"Bearer {wrong}"}
        assert call(port, "POST", "/api/vote", body=good, **header)[0] == 401, wrong
        assert call(port, "GET", "/api/task", **header)[0] == 401
    assert call(port, "POST", f"/api/vote?token={token}", body=good, Cookie=f"token={token}")[0] == 401
    assert call(port, "GET", "/api/vote", token=token)[0] == 405
    assert len(rows_of(running)) == before
    assert call(port, "POST", "/api/vote", token=token, body=good)[0] == 200
    assert call(port, "POST", "/api/vote", token=token, body=good)[0] == 200  # sent again: the same answer
    changed = {**good, "answers": {**answers, "visual quality": "tie"}}
    assert call(port, "POST", "/api/vote", token=token, body=changed)[0] == 409
    assert call(port, "POST", "/api/vote", token=token, body={**good, "nonce": "b" * 32})[0] == 409
    assert (
        call(port, "POST", "/api/vote", token=other, body={**theirs, "nonce": "a" * 32})[0] == 409
    )  # a nonce of another vote
    rows = rows_of(running)
    assert len(rows) == before + 3
    assert {row["answer"] for row in rows if row["rater"] == str(RATERS + 2)} == {"left"}


@pytest.mark.parametrize(
    "path",
    ["/clip/../study.sqlite", "/clip/..%2fstudy.sqlite", "/clip/%2e%2e%2fstudy.sqlite", "/clip//etc/passwd", "/clip/", "/clip/%00",
     "/clip/..%5c..%5cstudy.sqlite", "/../study.sqlite", "/study.sqlite", "/pages/rate.html", "/clip/" + "x" * 22, "/clip/%27%20OR%201=1--",
     "/rate.js/../../app.py", "/clips/0.mp4"],
)  # fmt: skip
def test_there_is_no_way_to_other_files(running: Running, path: str) -> None:
    status, body, _ = call(running.port, "GET", path)
    assert status == 404
    assert b"SQLite" not in body


def test_a_stored_name_or_link_does_not_open_other_files(running: Running) -> None:
    """The real names of the copies are no addresses, and a link put in a copy's place is not followed."""
    files = sorted((running.study / "clips").iterdir())
    assert call(running.port, "GET", f"/clip/{files[0].name}")[0] == 404
    assert call(running.port, "GET", f"/clip/{files[0].stem}")[0] == 404
    state = ask(running.port, running.tokens[RATERS + 2])
    wanted = call(running.port, "GET", f"/clip/{state['task']['left']}")[1]
    twins = [file for file in files if file.read_bytes() == wanted]
    for file in twins:
        file.rename(file.with_suffix(".kept"))
        file.symlink_to("../study.sqlite")
    try:
        assert call(running.port, "GET", f"/clip/{state['task']['left']}")[0] == 404
    finally:
        for file in twins:
            file.unlink()
            file.with_suffix(".kept").rename(file)


def test_videos_come_in_ranges(running: Running) -> None:
    name = ask(running.port, running.tokens[RATERS + 2])["task"]["left"]
    status, whole, headers = call(running.port, "GET", f"/clip/{name}")
    assert (status, headers["content-type"], headers["accept-ranges"]) == (200, "video/mp4", "bytes")
    status, part, headers = call(running.port, "GET", f"/clip/{name}", Range="bytes=10-29")
    assert (status, part, headers["content-range"]) == (206, whole[10:30], f"bytes 10-29/{len(whole)}")
    assert call(running.port, "GET", f"/clip/{name}", Range=f"bytes={len(whole)}-")[0] == 416


def test_results_are_for_the_admin_and_every_answer_is_guarded(running: Running) -> None:
    for path in ("/api/results", "/api/votes.csv"):
        for token in ("", running.tokens[0], "x" * 43):
            assert call(running.port, "GET", path, token=token)[0] == 401
        assert call(running.port, "GET", path, token=running.admin)[0] == 200
    for path in ("/rate", "/results", "/rate.js", "/study.css", "/api/task", "/nothing", "/"):
        _, body, headers = call(running.port, "GET", path)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in headers
        assert "server" not in headers
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in body


def test_a_connection_that_breaks_off_leaves_the_server_well(running: Running) -> None:
    token = running.tokens[RATERS + 2]
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(
            f"POST /api/vote HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{{".encode()
        )
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        sock.recv(1000)
    assert ask(running.port, token)["task"]


def test_a_rater_in_a_hurry_waits_and_others_do_not(tmp_path: Path) -> None:
    study, _, (first, second) = small_study(tmp_path, prompts=1, raters=2)
    with serving(study, "--limits.rate", "0.01", "--limits.burst", "3") as server:
        statuses = [call(server.port, "GET", "/api/task", token=first)[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert [call(server.port, "GET", "/api/task", token="x" * 43)[0] for _ in range(4)] == [401, 401, 401, 429]
        assert call(server.port, "GET", "/api/task", token=second)[0] == 200
