"""The reward server: an ASGI application that hosts any configured reward on another machine.

POST /score takes and returns safetensors bytes; GET /health and /metrics report its state. Malformed payloads, payloads that are too large, missing
tokens and overload are answered 400, 413, 401 and 503; a clip that the reward cannot score comes back as NaN with a reason, never as an error of the
server. Waiting requests are scored together, in one worker thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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


class Closing(RuntimeError):
    """The server stops; the request may be sent again."""


@dataclass
class Counters:
    """Values of /metrics, and of /health."""

    clips: int = 0
    failed: int = 0
    """Clips without a score."""
    batches: int = 0
    """Calls of the reward."""
    abandoned: int = 0
    """Clips that were not scored because their client had gone."""
    seconds: float = 0.0
    """Time in the reward."""
    unscored: int = 0
    """Calls in a row that scored nothing."""
    responses: Counter[int] = field(default_factory=Counter)
    """Answers by status."""


@dataclass(eq=False)
class _Job:
    request: ScoreRequest
    future: asyncio.Future[PartScores]

    @property
    def key(self) -> tuple[object, ...]:
        """Only clips of the same format and fps can share a call."""
        return (*self.request.videos.shape[1:], self.request.fps)

    @property
    def count(self) -> int:
        return len(self.request.prompts)


class Batcher:
    """Collects requests up to `max_batch` clips or `max_wait` seconds; one thread runs the reward."""

    def __init__(self, score: Scorer, *, max_batch: int, max_wait: float) -> None:
        self.counters = Counters()
        self.waiting: list[_Job] = []
        self._score, self._max_batch, self._max_wait = score, max_batch, max_wait
        self._came = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._task: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, request: ScoreRequest) -> PartScores:
        """The scores of one request; Closing if the server stops first."""
        if self._task is None or self._task.done():
            raise Closing("The server is stopping.")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self._came.set()
        return await job.future  # when this is cancelled, so is the future, and the job is passed over

    async def close(self) -> None:
        """Finish the running batch, and refuse waiting requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._running is not None:
            await asyncio.wait([self._running])
        for job in self.waiting:
            if not job.future.done():
                job.future.set_exception(Closing("The server is stopping."))
        self._executor.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            jobs = await self._gather()
            if not jobs:
                continue  # all clients have gone while the batch waited for more
            self.waiting = [job for job in self.waiting if job not in jobs]
            self._running = asyncio.create_task(self._score_jobs(jobs))
            # the worker thread cannot be stopped, so neither is its batch: close() waits for it
            await asyncio.shield(self._running)

    async def _gather(self) -> list[_Job]:
        """The first waiting request, and those of its format that fit and come in time; all stay queued until they are scored."""
        while not (jobs := self._fitting()):
            self._came.clear()
            await self._came.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait):
                while sum(job.count for job in jobs) < self._max_batch:
                    self._came.clear()
                    await self._came.wait()
                    jobs = self._fitting()
        return self._fitting()

    def _fitting(self) -> list[_Job]:
        """The first request whose client still waits, and those that can share its call; others are counted as abandoned."""
        gone = [job for job in self.waiting if job.future.done()]
        self.counters.abandoned += sum(job.count for job in gone)
        self.waiting = [job for job in self.waiting if job not in gone]
        jobs, clips = self.waiting[:1], sum(job.count for job in self.waiting[:1])
        for job in self.waiting[1:]:
            if job.key == jobs[0].key and clips + job.count <= self._max_batch:
                jobs.append(job)
                clips += job.count
        return jobs

    async def _score_jobs(self, jobs: list[_Job]) -> None:
        counters = self.counters
        start = time.monotonic()
        videos = torch.cat([job.request.videos for job in jobs]) if len(jobs) > 1 else jobs[0].request.videos
        prompts = [prompt for job in jobs for prompt in job.request.prompts]
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._executor, self._score, videos, prompts, jobs[0].request.fps)
        await asyncio.wait([call])
        error, offset = call.exception(), 0
        for job in jobs:
            if job.future.done():
                pass
            elif error is not None:
                job.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                job.future.set_result(_slice(call.result(), offset, job.count))
            offset += job.count
        failed = len(prompts) if error is not None else len(call.result().reasons)
        counters.unscored = counters.unscored + 1 if failed == len(prompts) else 0
        counters.batches, counters.clips = counters.batches + 1, counters.clips + len(prompts)
        counters.failed, counters.seconds = counters.failed + failed, counters.seconds + time.monotonic() - start


def _slice(scores: PartScores, offset: int, count: int) -> PartScores:
    reasons = {index - offset: text for index, text in scores.reasons.items() if 0 <= index - offset < count}
    return PartScores({part: value[offset : offset + count] for part, value in scores.items()}, reasons)


def check_binding(host: str, token: str) -> None:
    """Refuse to serve other machines without a token."""
    if not token and not is_loopback(host):
        raise RewardConfigError(
            f"Serving on {host} would let anybody use the reward: set a token, or bind to 127.0.0.1."
        )


class RewardServer:
    """The state behind the application: admission, batching and counters."""

    def __init__(self, score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> None:
        self.limits = limits or ServerLimits()
        self._token = token.encode()
        self._batcher = Batcher(score, max_batch=self.limits.max_batch, max_wait=self.limits.max_wait_ms / 1000)
        self.counters = self._batcher.counters
        self._open = 0
        self._bytes = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Start the worker; at the end finish the running batch."""
        self._batcher.start()
        try:
            yield
        finally:
            await self._batcher.close()

    async def score(self, request: Request) -> Response:
        """POST /score."""
        received, complete = bytearray(), False
        try:
            self._authorise(request)
            await self._receive(request, received)
            complete = True
            response = Response(await self._answer(request, received), media_type="application/octet-stream")
        except HTTPException as refused:
            headers = {"Retry-After": "1"} if refused.status_code == 503 else {}
            refusal = PlainTextResponse if complete else EarlyRefusal
            response = refusal(refused.detail, refused.status_code, headers)
        finally:
            self._bytes -= len(received)
        self.counters.responses[response.status_code] += 1
        return response

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise HTTPException(401, "A valid token is needed.")

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
                    self._bytes += len(chunk)
                    if len(received) > largest:
                        raise HTTPException(413, f"The request is larger than the allowed {largest} bytes.")
                    if self._bytes > self.limits.max_memory_mb * 2**20:
                        raise HTTPException(503, "The server holds as many bytes as it may.")
        except TimeoutError as error:
            raise HTTPException(408, "The request took too long to arrive.") from error
        except ClientDisconnect as error:
            raise HTTPException(400, "The connection broke before the request was complete.") from error

    async def _answer(self, request: Request, received: bytearray) -> bytes:
        """The encoded scores, unless the client disconnects first: it will ask again."""
        if self._open >= self.limits.max_queue:
            raise HTTPException(503, f"The server already has {self._open} requests.")
        self._open += 1
        tasks: list[asyncio.Future[Any]] = []
        try:
            decoded = await asyncio.to_thread(decode_request, received)
            scoring = asyncio.ensure_future(self._batcher.submit(decoded))
            leaving = asyncio.ensure_future(request.receive())  # after the body only a disconnect comes
            tasks = [scoring, leaving]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise HTTPException(499, "The client went away.")
            scores = scoring.result()
            return encode_response(decoded, scores, scores.reasons)
        except WireError as error:
            raise HTTPException(400, str(error)) from error
        except Closing as error:
            raise HTTPException(503, str(error)) from error
        except RuntimeError as error:  # a broken configuration: sending it again does not help
            raise HTTPException(500, str(error)) from error
        finally:
            self._open -= 1
            for task in tasks:
                task.cancel()

    async def health(self, _request: Request) -> Response:
        """GET /health, without a token: 503 after FAILING calls in a row that scored nothing."""
        failing = self.counters.unscored >= FAILING
        return JSONResponse({"status": "failing" if failing else "ok", "requests": self._open}, 503 if failing else 200)

    async def metrics(self, request: Request) -> Response:
        self._authorise(request)
        numbers = [
            ("clips_total", "counter", "Clips scored.", self.counters.clips),
            ("clips_failed_total", "counter", "Clips without a score.", self.counters.failed),
            ("clips_abandoned_total", "counter", "Clips whose client went away.", self.counters.abandoned),
            ("batches_total", "counter", "Calls of the reward.", self.counters.batches),
            ("reward_seconds_total", "counter", "Time in the reward.", self.counters.seconds),
            ("queue_requests", "gauge", "Requests that wait.", len(self._batcher.waiting)),
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
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


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
    routes = [
        Route("/score", server.score, methods=["POST"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=server.lifespan)
