"""The reward server: an ASGI application that hosts any configured reward on another machine.

POST /score takes and returns safetensors bytes; GET /health and /metrics tell how it does. Malformed payloads,
payloads that are too large, missing tokens and overload are answered 400, 413, 401 and 503; a clip that the reward
cannot score comes back as NaN with a reason, never as an error of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sage_grpo.rewards.batching import Batcher, Closing, Counters, Scorer
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.wire import WireError, decode_request, encode_response

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

DRAIN, DRAIN_SECONDS = 64 * 2**20, 10.0
"""How much of a refused body is read and thrown away, and for how long."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How much the server takes on."""

    max_batch: int = 16
    """Clips that are scored together."""
    max_wait_ms: float = 5.0
    """How long a batch waits for more requests."""
    max_queue: int = 256
    """Requests at a time, those being received included; more are answered 503."""
    max_body_mb: int = 1024
    """Largest request."""
    max_memory_mb: int = 8192
    """Bytes of all requests at a time; more are answered 503."""
    read_timeout_s: float = 120.0
    """How long a client may take to send its request."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_body_mb", "max_memory_mb", "read_timeout_s"):
            if getattr(self, name) <= 0:
                raise RewardConfigError(f"{name} must be positive, got {getattr(self, name)}.")


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(host: str, token: str) -> None:
    """Refuse to serve other machines without a token."""
    if not token and not is_loopback(host):
        raise RewardConfigError(
            f"Serving on {host} would let anybody use the reward: set a token, or bind to 127.0.0.1."
        )


class _Refused(Exception):
    """A request that is answered without scoring."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer:
    """The state behind the application: admission, batching and counters."""

    def __init__(self, score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> None:
        self.limits = limits or ServerLimits()
        self._token = token.encode()
        self._score = score
        self.counters = Counters()
        self._batcher: Batcher | None = None
        self._open = 0
        self._bytes = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Start the worker; on the way out finish the running batch."""
        self._batcher = Batcher(
            self._score,
            max_batch=self.limits.max_batch,
            max_wait=self.limits.max_wait_ms / 1000,
            counters=self.counters,
        )
        self._batcher.start()
        try:
            yield
        finally:
            await self._batcher.close()

    async def score(self, request: Request) -> Response:
        """POST /score."""
        from starlette.responses import PlainTextResponse, Response

        try:
            self._authorise(request)
            if self._open >= self.limits.max_queue:
                raise _Refused(503, f"The server already has {self._open} requests.")
            self._open += 1
            try:
                body = await self._answer(request)
            finally:
                self._open -= 1
        except _Refused as refused:
            headers = {"Retry-After": "1"} if refused.status == 503 else {}
            if refused.status in (401, 413, 503):
                await _drain(request)
            if refused.status in (401, 408, 413, 503):  # what is left of the body is not read
                headers["Connection"] = "close"
            return self._count(PlainTextResponse(str(refused), refused.status, headers=headers))
        return self._count(Response(body, media_type="application/octet-stream"))

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise _Refused(401, "A valid token is needed.")

    async def _answer(self, request: Request) -> bytes:
        assert self._batcher is not None
        received = bytearray()
        try:
            try:
                await asyncio.wait_for(self._receive(request, received), self.limits.read_timeout_s)
            except (asyncio.TimeoutError, TimeoutError) as error:
                raise _Refused(408, "The request took too long to arrive.") from error
            try:
                decoded = await asyncio.to_thread(decode_request, received)
            except WireError as error:
                raise _Refused(400, str(error)) from error
            try:
                scores = await self._batcher.submit(decoded)
            except Closing as error:
                raise _Refused(503, str(error)) from error
            except RuntimeError as error:  # a broken configuration: sending it again does not help
                raise _Refused(500, str(error)) from error
            return encode_response(decoded, scores, scores.reasons)
        finally:
            self._bytes -= len(received)

    async def _receive(self, request: Request, received: bytearray) -> None:
        """Read the body, and stop at the first byte too many."""
        from starlette.requests import ClientDisconnect

        largest = self.limits.max_body_mb * 2**20
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > largest:
            raise _Refused(413, f"{declared} bytes are more than the allowed {largest}.")
        try:
            async for chunk in request.stream():
                received += chunk
                self._bytes += len(chunk)
                if len(received) > largest:
                    raise _Refused(413, f"The request is larger than the allowed {largest} bytes.")
                if self._bytes > self.limits.max_memory_mb * 2**20:
                    raise _Refused(503, "The server holds as many bytes as it may.")
        except ClientDisconnect as error:
            raise _Refused(400, "The connection broke before the request was complete.") from error

    def _count(self, response: Response) -> Response:
        status = response.status_code
        self.counters.responses[status] = self.counters.responses.get(status, 0) + 1
        return response

    async def health(self, _request: Request) -> Response:
        """GET /health, open to all."""
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok", "requests": self._open})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, Prometheus' text format; needs the token."""
        from starlette.responses import PlainTextResponse

        try:
            self._authorise(request)
        except _Refused as refused:
            return PlainTextResponse(str(refused), refused.status)
        return PlainTextResponse(self._metrics_text(), media_type="text/plain; version=0.0.4")

    def _metrics_text(self) -> str:
        assert self._batcher is not None
        numbers = [
            ("clips_total", "counter", "Clips scored.", self.counters.clips),
            ("clips_failed_total", "counter", "Clips without a score.", self.counters.failed),
            ("batches_total", "counter", "Calls of the reward.", self.counters.batches),
            ("reward_seconds_total", "counter", "Time in the reward.", self.counters.seconds),
            ("queue_requests", "gauge", "Requests that wait.", self._batcher.depth),
            ("open_requests", "gauge", "Requests in the server.", self._open),
            ("received_bytes", "gauge", "Bytes of the open requests.", self._bytes),
        ]
        lines = []
        for name, kind, text, value in numbers:
            full = f"sage_grpo_reward_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
        full = "sage_grpo_reward_responses_total"
        lines += [f"# HELP {full} Answers by status.", f"# TYPE {full} counter"]
        lines += [f'{full}{{status="{code}"}} {count}' for code, count in sorted(self.counters.responses.items())]
        return "\n".join(lines) + "\n"


async def _drain(request: Request) -> None:
    """Throw away the rest of a body: a client that is still sending would never see the answer otherwise."""
    from starlette.requests import ClientDisconnect

    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > DRAIN:
        return

    async def discard() -> None:
        thrown = 0
        async for chunk in request.stream():
            thrown += len(chunk)
            if thrown > DRAIN:
                return

    # RuntimeError: the stream was read in part before, or to its end
    with contextlib.suppress(ClientDisconnect, RuntimeError, asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(discard(), DRAIN_SECONDS)


def create_app(score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> Starlette:
    """The ASGI application around a scorer (see `batching.composite_scorer`)."""
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise RewardConfigError('The reward server needs: pip install "sage-grpo[server]".') from error
    server = RewardServer(score, token=token, limits=limits)
    routes = [
        Route("/score", server.score, methods=["POST"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=server.lifespan)
