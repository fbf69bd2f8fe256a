"""A fake OpenAI-compatible endpoint in a thread: it answers from a list of replies and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    status: int = 200
    body: Any = None
    """Bytes are sent as they are, anything else as JSON."""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """How long it takes."""


def completion(content: Any, *, finish: str = "stop", refusal: str | None = None, usage: Any = (1000, 50)) -> Reply:
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    message = {"role": "assistant", "content": text, "refusal": refusal}
    body: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return Reply(body=body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lock = answer, threading.Lock()
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(({**self.headers, ":path": self.path}, body))
        reply = self.server.answer(body, number)
        self.server.stopped.wait(reply.seconds)
        payload = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(payload)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)


@contextlib.contextmanager
def judge_server(answer: Callable[[dict[str, Any], int], Reply] | list[Reply] | Reply) -> Iterator[Server]:
    if isinstance(answer, Reply):
        answer = [answer]
    if isinstance(answer, list):
        replies = answer
        answer = lambda body, number: replies[min(number, len(replies) - 1)]  # noqa: E731
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
        time.sleep(0)
