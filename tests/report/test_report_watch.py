"""The report of a run that goes on: served to this machine, renewed by itself, and nothing but its clips can be had."""

from __future__ import annotations

import http.client
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from report_zoo import fake_run, write_metrics
from sage_grpo.tools.report.watch import Handler, ReportServer

CLIP = "heldout-000002-01.mp4"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = fake_run(tmp_path / "going")
    (folder / ".finished").unlink()
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer([run], port=0, every=0.0) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield serving
        serving.shutdown()


def ask(server: ReportServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    line.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    line.endheaders()
    answer = line.getresponse()
    body = answer.read()
    line.close()
    return answer.status, body, dict(answer.getheaders())


def test_only_the_address_with_its_secret_is_answered(run: Path, server: ReportServer) -> None:
    token = f"/{server.token}"
    assert server.address == f"http://127.0.0.1:{server.server_port}{token}/"
    assert ask(server, f"{token}/")[0] == 200
    for host in ("localhost", "[::1]"):
        assert ask(server, f"{token}/?x=1", Host=f"{host}:{server.server_port}")[0] == 200
    for path in ("/", "/data.json", f"/{server.token[:-1]}/", f"/{server.token}x/data.json", "//", token):
        assert ask(server, path)[:2] == (404, b"Not found."), path
    assert ask(server, f"{token}/", Host="evil.example")[0] == 404
    (run.parent / "secret.mp4").write_bytes(b"secret")
    for name in ("../secret.mp4", "..%2fsecret.mp4", "/etc/passwd", "00-../secret.mp4", "00-config.yaml", ""):
        assert ask(server, f"{token}/clips/{name}")[0] == 404, name
    assert ask(server, f"{token}/other/00-{CLIP}")[0] == 404
    assert ask(server, f"{token}/clips/00-{CLIP}/more")[0] == 404


def test_every_answer_says_what_it_is_and_is_asked_for_again(server: ReportServer) -> None:
    """A browser that kept the page would show old news, and one that guessed kinds could run a clip."""
    kinds = {"": "text/html; charset=utf-8", "data.json": "application/json", f"clips/00-{CLIP}": "video/mp4"}
    for path, kind in {**kinds, "nothing": "text/plain; charset=utf-8"}.items():
        _, body, headers = ask(server, f"/{server.token}/{path}")
        guards = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        assert headers.items() >= {"Content-Type": kind, "Content-Length": str(len(body)), **guards}.items()


def test_clips_come_in_the_parts_that_a_player_asks_for(run: Path, server: ReportServer) -> None:
    whole = (run / "videos" / CLIP).read_bytes()
    path = f"/{server.token}/clips/00-{CLIP}"
    assert ask(server, path)[:2] == (200, whole)
    for asked, first, last in (("10-19", 10, 19), ("100-", 100, len(whole) - 1), ("7-9999999", 7, len(whole) - 1)):
        status, body, headers = ask(server, path, Range=f"bytes={asked}")
        assert (status, body) == (206, whole[first : last + 1])
        assert headers["Content-Range"] == f"bytes {first}-{last}/{len(whole)}"
        assert headers["Accept-Ranges"] == "bytes"
    assert ask(server, path, Range=f"bytes={len(whole) - 1}-")[0] == 206
    sent, nothing = io.BytesIO(), lambda *given: None
    one = {"headers": {"Range": "bytes=3-7"}, "send_response": nothing, "send_header": nothing, "_end": nothing}
    Handler._video(SimpleNamespace(**one, wfile=sent), run / "videos" / CLIP)  # type: ignore[arg-type]
    assert sent.getvalue() == whole[3:8], "no byte behind the announced length"
    assert ask(server, path, Range=f"bytes={len(whole)}-")[0] == 416
    assert ask(server, path, Range="bytes=junk")[:2] == (200, whole)
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    for _ in range(2):  # one connection: nothing is left on it by the answer before
        line.request("GET", path, headers={"Range": "bytes=10-19"})
        answer = line.getresponse()
        assert (answer.status, answer.read()) == (206, whole[10:20])
    line.close()
    (run / "videos" / CLIP).unlink()
    assert ask(server, path)[0] == 404


def test_news_are_sent_once_and_again_when_there_are_more(run: Path, server: ReportServer) -> None:
    path = f"/{server.token}/data.json"
    status, body, headers = ask(server, path)
    assert (status, json.loads(body)["runs"][0]["iteration"]) == (200, 4)
    assert ask(server, path, If_None_Match=headers["ETag"])[:2] == (304, b"")
    write_metrics(run, 6, 2)
    status, body, headers = ask(server, path, If_None_Match=headers["ETag"])
    assert (status, json.loads(body)["runs"][0]["iteration"]) == (200, 6)
    (run / ".finished").write_text("6\n")
    assert json.loads(ask(server, path, If_None_Match=headers["ETag"])[1])["runs"][0]["finished"]
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").unlink()
    assert ask(server, path)[0] == 503  # no run any more: the page shows the last it knew
