"""The fixture itself: a browser without network, whose errors fail a test."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_the_browser_has_no_network_but_loopback(open_page: Callable[..., Any], tmp_path: Path) -> None:
    class Hello(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *words: object) -> None: ...

    (tmp_path / "page.html").write_text("<!doctype html><title>x</title>")
    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(tmp_path / "page.html")
        ask = "url => fetch(url).then(answer => answer.text(), error => 'refused')"
        assert page.evaluate(ask, f"http://127.0.0.1:{server.server_port}/") == "hello"
        assert page.evaluate(ask, f"http://localhost:{server.server_port}/") == "refused"
        assert page.evaluate(ask, "http://example.com/") == "refused"
        server.shutdown()
    assert sum("NAME_NOT_RESOLVED" in fault for fault in page.faults) >= 1
    page.faults.clear()


def test_errors_of_a_page_are_seen(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    page_file.write_text("<!doctype html><script>console.error('told'); missing()</script>")
    page = open_page(page_file)
    assert any("told" in fault for fault in page.faults)
    assert any("missing" in fault for fault in page.faults)
    page.faults.clear()
