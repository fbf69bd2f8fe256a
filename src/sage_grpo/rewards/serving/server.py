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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sage_grpo.config.ranges import Count, NotNegative, Seconds, checked
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.serving.wire import ScoreRequest, WireError, decode_request, encode_response
from sage_grpo.types import PartScores
from sage_grpo.utils.http_server import Refused, check_installed, is_loopback

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

Scorer = Callable[[torch.Tensor, list[str], float], PartScores]


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
    """Values of /metrics."""

    clips: int = 0
    """Clips scored."""
    failed: int = 0
    """Clips without a score."""
    batches: int = 0
    """Calls of the reward."""
    abandoned: int = 0
    """Clips that were not scored because their client had gone."""
    seconds: float = 0.0
    """Time in the reward."""
    last_clips: int = 0
    """Clips of the last call of the reward."""
    last_failed: int = 0
    """Clips of it without a score."""
    unscored: int = 0
    """Calls in a row that scored nothing."""
    failing: bool = False
    """True if the reward is at fault, and not the clips."""
    last_end: float | None = None
    """End of the last call, by the monotonic clock."""
    running_since: float | None = None
    """Start of the running call."""
    responses: dict[int, int] = field(default_factory=dict)
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
        return self.request.videos.shape[0]


UNPROVEN = 3
"""Calls in a row without a score after which a reward that has never scored a clip counts as failing."""


class Batcher:
    """Collects requests up to `max_batch` clips or `max_wait` seconds; one thread runs the reward."""

    def __init__(self, score: Scorer, *, max_batch: int, max_wait: float) -> None:
        self.counters = Counters()
        self._score, self._max_batch, self._max_wait = score, max_batch, max_wait
        self._waiting: list[_Job] = []
        self._proof: tuple[torch.Tensor, list[str], float] | None = None
        """A clip that was scored: if it is scored again, the clips failed and not the reward."""
        self._came = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._task: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to serve, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, request: ScoreRequest) -> PartScores:
        """The scores of one request; Closing if the server stops first."""
        if self._task is None or self._task.done():
            raise Closing("The server is stopping.")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._came.set()
        return await job.future  # when this is cancelled, so is the future, and the job is passed over

    async def close(self) -> None:
        """Finish the running batch, and refuse waiting requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._running is not None:
            await asyncio.wait([self._running])
        for job in self._waiting:
            if not job.future.done():
                job.future.set_exception(Closing("The server is stopping."))
        self._executor.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            jobs = await self._gather()
            if not jobs:
                continue  # all clients have gone while the batch waited for more
            self._waiting = [job for job in self._waiting if job not in jobs]
            self._running = asyncio.create_task(self._score_jobs(jobs))
            # the worker thread cannot be stopped, so neither is its batch: close() waits for it
            await asyncio.shield(self._running)

    async def _gather(self) -> list[_Job]:
        """The first waiting request, and those of its format that fit and come in time; all stay queued until they are scored."""
        while not (jobs := self._fitting()):
            await self._news(None)
        deadline = time.monotonic() + self._max_wait
        while sum(job.count for job in jobs) < self._max_batch and (left := deadline - time.monotonic()) > 0:
            await self._news(left)
            jobs = self._fitting()
        return jobs

    async def _news(self, seconds: float | None) -> None:
        """Wait for another request, at most so long."""
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), seconds)

    def _fitting(self) -> list[_Job]:
        """The first request whose client still waits, and those that can share its call; others are counted as abandoned."""
        gone = [job for job in self._waiting if job.future.done()]
        self.counters.abandoned += sum(job.count for job in gone)
        self._waiting = [job for job in self._waiting if job not in gone]
        jobs, clips = self._waiting[:1], sum(job.count for job in self._waiting[:1])
        for job in self._waiting[1:]:
            if job.key == jobs[0].key and clips + job.count <= self._max_batch:
                jobs.append(job)
                clips += job.count
        return jobs

    async def _score_jobs(self, jobs: list[_Job]) -> None:
        counters = self.counters
        start = counters.running_since = time.monotonic()
        videos = torch.cat([job.request.videos for job in jobs]) if len(jobs) > 1 else jobs[0].request.videos
        prompts = [prompt for job in jobs for prompt in job.request.prompts]
        call = await self._call(videos, prompts, jobs[0].request.fps)
        error = call.exception()
        scored = [] if error is not None else [i for i in range(len(prompts)) if i not in call.result().reasons]
        counters.unscored = 0 if scored else counters.unscored + 1
        if scored and self._proof is None:
            first = slice(scored[0], scored[0] + 1)
            self._proof = videos[first].clone(), prompts[first], jobs[0].request.fps
        counters.failing = not scored and not await self._scores_proof()
        offset = 0
        for job in jobs:
            if job.future.done():
                pass
            elif error is not None:
                job.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                job.future.set_result(_slice(call.result(), offset, job.count))
            offset += job.count
        failed = offset - len(scored)
        now = time.monotonic()
        counters.batches, counters.clips = counters.batches + 1, counters.clips + offset
        counters.failed, counters.seconds = counters.failed + failed, counters.seconds + now - start
        counters.last_clips, counters.last_failed, counters.last_end = offset, failed, now
        counters.running_since = None

    async def _call(self, *batch: Any) -> asyncio.Future[PartScores]:
        """Call the reward; returns the finished future, also after an error."""
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._score, *batch)
        await asyncio.wait([call])
        return call

    async def _scores_proof(self) -> bool:
        """True if the reward still scores its proof clip; without one, until UNPROVEN calls in a row have failed."""
        if self._proof is None:
            return self.counters.unscored < UNPROVEN
        self._proof[0].view(-1)[0] += 1  # so that no cache can answer this call
        call = await self._call(*self._proof)
        return call.exception() is None and not call.result().reasons


def _slice(scores: PartScores, offset: int, count: int) -> PartScores:
    reasons = {index - offset: text for index, text in scores.reasons.items() if 0 <= index - offset < count}
    return PartScores({part: value[offset : offset + count] for part, value in scores.items()}, reasons)


LINGER = 1.0
"""Seconds that a connection stays open after a refusal: a client that is still sending could not read it otherwise."""


@checked
class ServerLimits:
    """Limits on the server's load."""

    max_batch: Count = 16
    """Clips that are scored together."""
    max_wait_ms: NotNegative = 5.0
    """Milliseconds that a batch waits for more requests."""
    max_queue: Count = 256
    """Requests that wait or are scored at a time; more are answered 503."""
    max_connections: Count = 2048
    """Connections at a time. One more takes the place of the one that has been longest without a whole request."""
    max_body_mb: Count = 1024
    """Largest request."""
    max_memory_mb: Count = 8192
    """Bytes of all requests at a time; more are answered 503."""
    header_timeout_s: Seconds = 10.0
    """Seconds that a connection may be open without complete headers of a request."""
    idle_timeout_s: Seconds = 10.0
    """Seconds that a client may pause while it sends its clips."""
    read_timeout_s: Seconds = 120.0
    """Seconds that a client may take to send its request."""


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
        from starlette.responses import Response

        body = _Body(request.receive)
        try:
            self._authorise(request)
            answer = await self._answer(request, body)
        except Refused as refused:
            headers = {"Retry-After": "1"} if refused.status == 503 else {}
            return self._count(_refusal(str(refused), refused.status, headers, body))
        return self._count(Response(answer, media_type="application/octet-stream"))

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise Refused(401, "A valid token is needed.")

    async def _answer(self, request: Request, body: _Body) -> bytes:
        received = bytearray()
        try:
            try:
                await asyncio.wait_for(self._receive(request, body, received), self.limits.read_timeout_s)
            except TimeoutError as error:
                raise Refused(408, "The request took too long to arrive.") from error
            if self._open >= self.limits.max_queue:
                raise Refused(503, f"The server already has {self._open} requests.")
            self._open += 1
            try:
                decoded = await asyncio.to_thread(decode_request, received)
                scores = await self._scores(decoded, body)
                return encode_response(decoded, scores, scores.reasons)
            except WireError as error:
                raise Refused(400, str(error)) from error
            finally:
                self._open -= 1
        finally:
            self._bytes -= len(received)

    async def _scores(self, request: ScoreRequest, body: _Body) -> PartScores:
        """The scores, unless the client disconnects first: it will ask again."""
        scoring = asyncio.ensure_future(self._batcher.submit(request))
        leaving = asyncio.ensure_future(body.client_gone())
        try:
            await asyncio.wait([scoring, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise Refused(499, "The client went away.")
            return scoring.result()
        except Closing as error:
            raise Refused(503, str(error)) from error
        except RuntimeError as error:  # a broken configuration: sending it again does not help
            raise Refused(500, str(error)) from error
        finally:
            for task in (scoring, leaving):
                task.cancel()

    async def _receive(self, request: Request, body: _Body, received: bytearray) -> None:
        """Read the body, and stop at the first byte too many."""
        largest = self.limits.max_body_mb * 2**20
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > largest:
            raise Refused(413, f"{declared[:20]} bytes are more than the allowed {largest}.")
        while body.more:
            chunk = await asyncio.wait_for(body.next(), self.limits.idle_timeout_s)
            received += chunk
            self._bytes += len(chunk)
            if len(received) > largest:
                raise Refused(413, f"The request is larger than the allowed {largest} bytes.")
            if self._bytes > self.limits.max_memory_mb * 2**20:
                raise Refused(503, "The server holds as many bytes as it may.")
        if body.gone:
            raise Refused(400, "The connection broke before the request was complete.")

    def _count(self, response: Response) -> Response:
        status = response.status_code
        self.counters.responses[status] = self.counters.responses.get(status, 0) + 1
        return response

    async def health(self, _request: Request) -> Response:
        """GET /health, without a token: 503 when the reward fails. Clips that cannot be scored are not a failure of the reward."""
        from starlette.responses import JSONResponse

        now, last = time.monotonic(), self.counters
        content = {
            "status": "failing" if last.failing else "ok",
            "requests": self._open,
            "last_clips": last.last_clips,
            "last_failed": last.last_failed,
            "last_seconds_ago": None if last.last_end is None else round(now - last.last_end, 3),
            "running_seconds": None if last.running_since is None else round(now - last.running_since, 3),
        }
        return JSONResponse(content, 503 if last.failing else 200)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, Prometheus' text format; needs the token."""
        from starlette.responses import PlainTextResponse

        try:
            self._authorise(request)
        except Refused as refused:
            return PlainTextResponse(str(refused), refused.status)
        numbers = [
            ("clips_total", "counter", "Clips scored.", self.counters.clips),
            ("clips_failed_total", "counter", "Clips without a score.", self.counters.failed),
            ("clips_abandoned_total", "counter", "Clips whose client went away.", self.counters.abandoned),
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
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


class _Body:
    """The body of a request, piece by piece, and the disconnect message after it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more, self.gone = True, False

    async def next(self) -> bytes:
        """The next piece."""
        message = await self._receive()
        self.gone = message["type"] == "http.disconnect"
        self.more = not self.gone and message.get("more_body", False)
        return message.get("body", b"")

    async def client_gone(self) -> None:
        """Returns when the client has closed the connection."""
        while not self.gone:
            await self.next()


def _refusal(text: str, status: int, headers: dict[str, str], body: _Body) -> Response:
    """An answer that is sent at once; then the rest of the body is discarded for a moment, and the connection closed."""
    from starlette.responses import PlainTextResponse

    class Refusal(PlainTextResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self.discard(), LINGER)
            await send({"type": "http.response.body", "body": b""})

        async def discard(self) -> None:
            while body.more:
                await body.next()

    if body.more:
        headers = {**headers, "Connection": "close"}
    return Refusal(text, status, headers=headers)


def create_app(score: Scorer, *, token: str = "", limits: ServerLimits | None = None) -> Starlette:
    """The ASGI application around a scorer (see `composite_scorer`)."""
    check_installed()
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = RewardServer(score, token=token, limits=limits)
    routes = [
        Route("/score", server.score, methods=["POST"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=server.lifespan)
