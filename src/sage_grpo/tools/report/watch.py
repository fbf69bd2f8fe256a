"""The report of an unfinished run, served to this machine only: the page polls for changes and redraws itself.

Standard library only. An address holds a secret: other users of the machine and pages of other sites do not know it. Files are looked
up in a list of clips, never by a path from a request.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sage_grpo.tools.report.page import as_script, describe, read_runs, render
from sage_grpo.utils.safe_io import is_inside

CHUNK = 1 << 16


class Watcher:
    """Reads the runs again when they have changed, at most once in `every` seconds in all."""

    def __init__(self, folders: Sequence[Path], every: float) -> None:
        self.folders, self.every = list(folders), every
        self._roots = [folder.absolute() for folder in folders]
        self._lock = threading.Lock()
        self._read, self._stamp = -1.0, ""
        self._data: dict[str, Any] = {}
        self._names: dict[str, Path] = {}

    def data(self) -> tuple[dict[str, Any], str]:
        """The data of the page now, and a text that changes when they do."""
        with self._lock:
            now = time.monotonic()
            if not self._data or now - self._read >= self.every:
                stamp = self._look()
                if stamp != self._stamp:
                    self._data, self._stamp = self._describe(), stamp
                self._read = now
            return self._data, self._stamp

    def clip(self, name: str) -> Path | None:
        """The file of a clip that a page may request; None if a link has replaced it since."""
        with self._lock:
            file = self._names.get(name)
        here = (
            file is not None and not file.is_symlink() and any(is_inside(one, file.absolute()) for one in self._roots)
        )
        return file if here else None

    def _describe(self) -> dict[str, Any]:
        data, files = describe(read_runs(self.folders))
        names = [f"{place:02d}-{file.name}" for place, file in files]
        self._names |= {name: file for name, (_, file) in zip(names, files)}
        data["clips"] = {"kind": "files", "list": [f"clips/{name}" for name in names]}
        data["watch"] = self.every
        return data

    def _look(self) -> str:
        """Sizes and times of the report's files."""
        seen: list[tuple[str, int, int]] = []
        for folder in self.folders:
            names = ("metrics.jsonl", "events.jsonl", "config.yaml", ".finished")
            for file in [*(folder / name for name in names), *sorted((folder / "videos").glob("heldout-*.json"))]:
                with suppress(OSError):  # it is not there, or not yet
                    seen.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
        return f"{hash(tuple(seen)) & 0xFFFFFFFFFFFF:x}"


class Handler(BaseHTTPRequestHandler):
    """GET /TOKEN/, /TOKEN/data.json and /TOKEN/clips/NAME; all else is 404."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    server: ReportServer

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].split("/")
        if not self._allowed(parts):
            return self._plain(HTTPStatus.NOT_FOUND, "Not found.")
        rest = "/".join(parts[2:])
        try:
            if rest in ("", "data.json"):
                return self._page(data_only=rest == "data.json")
        except (OSError, ValueError) as error:  # a run that was moved away; the page keeps its last data
            return self._plain(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        file = self.server.watcher.clip(parts[3]) if len(parts) == 4 and parts[2] == "clips" else None
        if file is None or not file.is_file():
            return self._plain(HTTPStatus.NOT_FOUND, "Not found.")
        return self._video(file)

    def _allowed(self, parts: list[str]) -> bool:
        """The secret, and a name of this machine: a page of another site could point its own name here."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        token = parts[1] if len(parts) > 2 else ""
        here = host in ("127.0.0.1", "localhost", "[::1]")
        return hmac.compare_digest(token.encode(), self.server.token.encode()) and here

    def _page(self, *, data_only: bool) -> None:
        data, stamp = self.server.watcher.data()
        if not data_only:
            return self._send(render(data).encode(), "text/html; charset=utf-8")
        if self.headers.get("If-None-Match") == f'"{stamp}"':
            self.send_response(HTTPStatus.NOT_MODIFIED)
            return self.end_headers()
        return self._send(as_script(data).encode(), "application/json", {"ETag": f'"{stamp}"'})

    def _video(self, file: Path) -> None:
        """Send a file, or the requested range."""
        with file.open("rb") as stream:
            size = file.stat().st_size
            asked = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", self.headers.get("Range", ""))
            start, end = (int(asked[1]), int(asked[2] or size - 1)) if asked else (0, size - 1)
            end = min(end, size - 1)
            if asked and start > end:
                return self._plain(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "Out of range.")
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            self.send_header("Content-Type", "video/mp4")
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
            self._end(end - start + 1)
            stream.seek(start)
            left = end - start + 1
            while left > 0 and (chunk := stream.read(min(CHUNK, left))):
                self.wfile.write(chunk)
                left -= len(chunk)

    def _plain(self, status: HTTPStatus, text: str) -> None:
        self._send(text.encode(), "text/plain; charset=utf-8", status=status)

    def _send(
        self, body: bytes, kind: str, headers: dict[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._end(len(body))
        self.wfile.write(body)

    def _end(self, length: int) -> None:
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Log nothing: a page polls every few seconds."""


class ReportServer(ThreadingHTTPServer):
    """Serves one report on this machine."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], *, port: int, every: float) -> None:
        self.watcher, self.token = Watcher(folders, every), secrets.token_urlsafe(16)
        self.watcher.data()  # errors of a folder are raised before anything is served
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that leaves in the middle of a clip."""
