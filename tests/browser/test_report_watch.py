"""The report of a run that goes on: served to this machine, renewed by itself, and nothing but its clips can be had."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from report_zoo import fake_run, write_metrics
from sage_grpo.report.watch import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = fake_run(tmp_path / "going")
    (folder / ".finished").unlink()
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server([run], port=0, every=0.1) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield serving
        serving.shutdown()


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    line.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    line.endheaders()
    answer = line.getresponse()
    body = answer.read()
    line.close()
    return answer.status, body, dict(answer.getheaders())


def test_a_watched_run_is_drawn_anew_when_it_has_news(open_page: Callable[..., Any], run: Path, server: Server) -> None:
    page = open_page(server.address)
    assert page.inner_text("#status") == "4/4 iterations"
    page.click("#tab-gallery")
    page.wait_for_function("() => [...document.querySelectorAll('video')].every(video => video.readyState >= 2)")
    page.fill("#filter", "circle")
    write_metrics(run, 6, 2)
    page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('6/')")
    assert page.input_value("#filter") == "circle"
    assert page.locator(".clip-card").count() == 2
    (run / ".finished").write_text("6\n")
    page.wait_for_function("() => document.querySelector('#status').textContent.includes('finished')")


def test_only_the_address_with_its_secret_is_answered(run: Path, server: Server) -> None:
    token = f"/{server.token}"
    assert ask(server, f"{token}/")[0] == 200
    assert ask(server, f"{token}/", Host=f"localhost:{server.server_port}")[0] == 200
    for path in ("/", "/data.json", f"/{server.token[:-1]}/", f"/{server.token}x/data.json", "//", token):
        assert ask(server, path)[0] == 404, path
    assert ask(server, f"{token}/", Host="evil.example")[0] == 404
    (run.parent / "secret.mp4").write_bytes(b"secret")
    for name in (
        "../secret.mp4",
        "..%2fsecret.mp4",
        "/etc/passwd",
        "00-../secret.mp4",
        "config.yaml",
        "00-config.yaml",
        "",
    ):
        assert ask(server, f"{token}/clips/{name}")[0] == 404, name


def test_clips_come_in_the_parts_that_a_player_asks_for(run: Path, server: Server) -> None:
    whole = (run / "videos" / "heldout-000002-01.mp4").read_bytes()
    path = f"/{server.token}/clips/00-heldout-000002-01.mp4"
    assert ask(server, path)[:2] == (200, whole)
    status, body, headers = ask(server, path, Range="bytes=10-19")
    assert (status, body) == (206, whole[10:20])
    assert headers["Content-Range"] == f"bytes 10-19/{len(whole)}"
    assert ask(server, path, Range="bytes=100-")[:2] == (206, whole[100:])
    assert ask(server, path, Range=f"bytes={len(whole)}-")[0] == 416
    assert ask(server, path, Range="bytes=junk")[:2] == (200, whole)


def test_news_are_sent_once(server: Server) -> None:
    path = f"/{server.token}/data.json"
    status, _, headers = ask(server, path)
    assert status == 200
    assert ask(server, path, If_None_Match=headers["ETag"])[0] == 304
