"""The study's server against raters in a hurry, forgers and guessers."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

import needs
from sage_grpo.cli import study as command
from sage_grpo.tools.study.app import HEADERS
from studies import ask, call, small_study, vote_for

SECRETS = (b"sage", b"flow", b"base", b"spoilt", b"degraded", b"same", b"clip.mp4")
GUARDS = {name.lower() for name in HEADERS}


class Running(NamedTuple):
    port: int
    study: Path
    admin: str
    tokens: list[str]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    study, admin, tokens = small_study(tmp_path_factory.mktemp("study"), prompts=3, raters=3, checks=0.1)
    servers: list[uvicorn.Server] = []

    class Kept(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    port = needs.free_port()
    serve = threading.Thread(target=command.run, args=[command.Options(action="serve", study=study, port=port)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Kept)
        serve.start()
        while serve.is_alive() and not (servers and servers[0].started):
            serve.join(0.05)
    assert call(port, "GET", "/health")[:2] == (200, b"ok")
    yield Running(port, study, admin, tokens)
    servers[0].should_exit = True
    serve.join()


def rows_of(running: Running) -> list[dict[str, str]]:
    body = call(running.port, "GET", "/api/votes.csv", token=running.admin)[1]
    return list(csv.DictReader(io.StringIO(body.decode())))


def test_the_raters_page_never_hears_of_methods_or_checks(running: Running) -> None:
    token = running.tokens[0]
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
    token, other, port = running.tokens[1], running.tokens[2], running.port
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
    for kind in ("text/plain", "multipart/form-data"):  # what a foreign page could send
        assert call(port, "POST", "/api/vote", token=token, body=good, Content_Type=kind)[0] == 415
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
    again = {**theirs, "nonce": "a" * 32}  # a nonce of another vote
    assert call(port, "POST", "/api/vote", token=other, body=again)[0] == 409
    rows = rows_of(running)
    assert len(rows) == before + 3
    assert {row["answer"] for row in rows if row["rater"] == "2"} == {"left"}


def test_there_is_no_way_to_other_files(running: Running) -> None:
    for path in (
        "/clip/../study.sqlite", "/clip/..%2fstudy.sqlite", "/clip/%2e%2e%2fstudy.sqlite", "/clip//etc/passwd", "/clip/", "/clip/%00",
        "/clip/..%5c..%5cstudy.sqlite", "/../study.sqlite", "/study.sqlite", "/pages/rate.html", "/clip/" + "x" * 22,
        "/clip/%27%20OR%201=1--", "/rate.js/../../app.py", "/clips/0.mp4",
    ):  # fmt: skip
        status, body, _ = call(running.port, "GET", path)
        assert status == 404, path
        assert b"SQLite" not in body


def test_results_are_for_the_admin_and_every_answer_is_guarded(running: Running) -> None:
    for path in ("/api/results", "/api/votes.csv"):
        for token in ("", running.tokens[0], "x" * 43):
            assert call(running.port, "GET", path, token=token)[0] == 401
        assert call(running.port, "GET", path, token=running.admin)[0] == 200
    kinds = {"/rate": "text/html", "/results": "text/html", "/rate.js": "text/javascript", "/study.css": "text/css"}
    for path in (*kinds, "/api/task", "/nothing", "/"):
        status, body, headers = call(running.port, "GET", path)
        if path in kinds:
            assert (status, headers["content-type"].split(";")[0], bool(body)) == (200, kinds[path], True)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "set-cookie" not in headers
        assert "server" not in headers


def test_a_pair_with_a_sound_says_so_and_pages_are_what_they_are(running: Running, tmp_path: Path) -> None:
    token = running.tokens[2]
    assert ask(running.port, token)["sound"] is False
    (running.study / "clips").rename(tmp_path / "away")
    try:
        assert ask(running.port, token)["sound"] is False  # nothing is there to be heard
    finally:
        (tmp_path / "away").rename(running.study / "clips")
    status, _, headers = call(running.port, "GET", "/")
    assert (status, headers["location"]) == (307, "rate")
