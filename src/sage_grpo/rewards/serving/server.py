"""The reward server: an ASGI application that hosts any configured reward on another machine.

POST /score takes and returns safetensors bytes; GET /health reports its state. Malformed payloads, payloads that are too large, missing tokens and
overload are answered 400, 413, 401 and 503; a clip that the reward cannot score comes back as NaN with a reason, never as an error of the server.
Requests are scored one after another, in one worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.serving import ServerLimits
from sage_grpo.rewards.serving.wire import ScoreRequest, WireError, decode_request, encode_response
from sage_grpo.types import PartScores
from sage_grpo.utils.http_server import is_loopback

Scorer = Callable[[torch.Tensor, list[str], float], PartScores]
FAILING = 3
"""Calls in a row that scored no clip, after which the server reports that its reward fails."""
LINGER = 1.0
"""Seconds that a connection stays open after a refusal: a client that is still sending could not read it otherwise."""


def composite_scorer(composite: CompositeReward) -> Scorer:
    """The parts of a composite reward, with a reason for every clip that has none."""

    def score(videos: torch.Tensor, prompts: list[str], fps: float) -> PartScores:
        scores, report = composite.score(videos, prompts, fps)
        reasons: dict[int, str] = {}
        for failure in report.failures:
            earlier = f"{reasons[failure.index]}; " if failure.index in reasons else ""
            reasons[failure.index] = f"{earlier}{failure.reward}: {failure.reason}"
        return PartScores(dict(scores.parts), reasons)

    return score


def check_binding(host: str, token: str) -> None:
    """Refuse to serve other machines without a token."""
    if not token and not is_loopback(host):
        raise RewardConfigError(f"Serving on {host} lets anybody use the reward: set a token, or bind to 127.0.0.1.")


class RewardServer:
    """The state behind the application: admission, one worker thread for the reward, and its health."""

    def __init__(self, score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> None:
        self.limits, self._token = limits or ServerLimits(), token.encode()
        self._score = score
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self.open = self.bytes = self._unscored = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)  # what is being scored is finished

    async def score(self, request: Request) -> Response:
        received, complete = bytearray(), False
        try:
            given = request.headers.get("authorization", "").encode()
            if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
                raise HTTPException(401, "A valid token is needed.")
            await self._receive(request, received)
            complete = True
            response = Response(await self._answer(request, received), media_type="application/octet-stream")
        except HTTPException as refused:
            headers = {"Retry-After": "1"} if refused.status_code == 503 else {}
            refusal = PlainTextResponse if complete else EarlyRefusal
            response = refusal(refused.detail, refused.status_code, headers)
        finally:
            self.bytes -= len(received)
        return response

    async def _receive(self, request: Request, received: bytearray) -> None:
        """Read the body, and stop at the first byte too many."""
        largest = self.limits.max_body_mb * 2**20
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > largest:
            raise HTTPException(413, f"{declared[:20]} bytes are more than the allowed {largest}.")
        chunks = request.stream()
        try:
            async with asyncio.timeout(self.limits.read_timeout_s):
                while chunk := await asyncio.wait_for(anext(chunks), self.limits.idle_timeout_s):
                    received += chunk
                    self.bytes += len(chunk)
                    if len(received) > largest:
                        raise HTTPException(413, f"The request is larger than the allowed {largest} bytes.")
                    if self.bytes > self.limits.max_memory_mb * 2**20:
                        raise HTTPException(503, "The server holds as many bytes as it may.")
        except TimeoutError as error:
            raise HTTPException(408, "The request took too long to arrive.") from error
        except ClientDisconnect as error:
            raise HTTPException(400, "The connection broke before the request was complete.") from error

    async def _answer(self, request: Request, received: bytearray) -> bytes:
        """The encoded scores, unless the client disconnects first: it will ask again."""
        if self.open >= self.limits.max_queue:
            raise HTTPException(503, f"The server already has {self.open} requests.")
        self.open += 1
        tasks: list[asyncio.Future[Any]] = []
        try:
            decoded = await asyncio.to_thread(decode_request, received)
            scoring = asyncio.get_running_loop().run_in_executor(self._executor, self._score_clips, decoded)
            leaving = asyncio.ensure_future(request.receive())  # after the body only a disconnect comes
            tasks = [scoring, leaving]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise HTTPException(499, "The client went away.")
            return encode_response(decoded.checksum, scoring.result())
        except WireError as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:  # a broken configuration: sending it again does not help
            raise HTTPException(500, str(error)) from error
        finally:
            self.open -= 1
            for task in tasks:
                task.cancel()  # a request that still waits for the worker is not scored

    def _score_clips(self, request: ScoreRequest) -> PartScores:
        count = failed = len(request.prompts)
        try:
            scores = self._score(request.videos, request.prompts, request.fps)
            failed = len(scores.reasons)
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._unscored = self._unscored + 1 if failed == count else 0
        return scores

    async def health(self, _request: Request) -> Response:
        """GET /health, without a token: 503 after FAILING calls in a row that scored nothing."""
        failing = self._unscored >= FAILING
        return JSONResponse({"status": "failing" if failing else "ok", "requests": self.open}, 503 if failing else 200)


class EarlyRefusal(PlainTextResponse):
    """An answer that is sent at once; then the rest of the body is discarded for a moment, and the connection closed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


def create_app(score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> Starlette:
    """The ASGI application around a scorer (see `composite_scorer`)."""
    server = RewardServer(score, token=token, limits=limits)
    routes = [Route("/score", server.score, methods=["POST"]), Route("/health", server.health, methods=["GET"])]
    return Starlette(routes=routes, lifespan=server.lifespan)
