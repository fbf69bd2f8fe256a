"""The web application: pages for raters and for results, and their few requests.

A token in the Authorization header decides the access rights. It comes from the part of the link behind `#`, which browsers
do not send: it is in no log and no Referer, and without cookies other sites have nothing to abuse. Videos have
names of their own for every task and side, which only the rater of the task gets.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from sage_grpo.tools.study.making import clip_file
from sage_grpo.tools.study.results import results, to_csv
from sage_grpo.tools.study.store import ANSWERS, NoSuchTask, OtherVote, Store
from sage_grpo.utils.http_server import Refused
from sage_grpo.utils.json_schema import misfit, parse_json
from sage_grpo.utils.video import has_sound

PAGES = Path(__file__).parent / "pages"
ASSETS = {
    "/rate": ("rate.html", "text/html"),
    "/results": ("results.html", "text/html"),
    "/study.css": ("study.css", "text/css"),
    "/rate.js": ("rate.js", "text/javascript"),
    "/results.js": ("results.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
NONCE = re.compile(r"[0-9a-f]{32}")
OPAQUE = re.compile(r"[\w-]{16,64}", re.ASCII)


MAX_BODY = 4096
BODY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """The body of a vote."""

    task: str
    nonce: str
    answers: dict[str, str]


class Buckets:
    """A bucket of requests for each name, filled at a rate; the names used longest ago are forgotten."""

    def __init__(self, rate: float, burst: int, most: int = 10_000) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        now = time.monotonic()
        left, since = self._left.pop(name, (float(self._burst), now))
        left = min(self._burst, left + (now - since) * self._rate)
        self._left[name] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return left >= 1


class StudyServer:
    """The handlers behind the routes."""

    def __init__(self, store: Store, clips: Path, *, rate: float, burst: int) -> None:
        self.store, self.clips = store, clips
        self._buckets = Buckets(rate, burst)

    async def task(self, request: Request) -> Response:
        return await self._state(await self._rater(request))

    async def vote(self, request: Request) -> Response:
        """POST /api/vote: store a vote, answer with the next task. The same vote again gets the same answer."""
        rater = await self._rater(request)
        ballot = self._read_vote(await self._body(request))
        try:
            await asyncio.to_thread(self.store.vote, rater, ballot.task, ballot.nonce, ballot.answers)
        except NoSuchTask as error:
            raise Refused(404, str(error)) from error
        except OtherVote as error:
            raise Refused(409, str(error)) from error
        return await self._state(rater)

    async def clip(self, request: Request) -> Response:
        """GET /clip/NAME: a video, whole or in ranges."""
        name = request.path_params["name"]
        file = await asyncio.to_thread(self.store.clip, name) if OPAQUE.fullmatch(name) else None
        path = None if file is None else clip_file(self.clips, file)
        if path is None:
            raise self._invalid(request, 404, "There is no such video.")
        kind = {".mp4": "video/mp4", ".webm": "video/webm"}[path.suffix]
        return FileResponse(path, media_type=kind, headers={"Cache-Control": "private, max-age=86400, immutable"})

    async def results(self, request: Request) -> Response:
        await self._admin(request)
        exclude = request.query_params.get("exclude_flagged") == "1"
        return JSONResponse(await asyncio.to_thread(results, self.store, exclude_flagged=exclude))

    async def votes(self, request: Request) -> Response:
        await self._admin(request)
        return Response(await asyncio.to_thread(to_csv, self.store), media_type="text/csv")

    async def _state(self, rater: int) -> Response:
        asked = await asyncio.to_thread(self.store.ask, rater)
        done, total = (await asyncio.to_thread(self.store.progress))[rater]
        study = self.store.study
        return JSONResponse(
            {
                "title": study.title,
                "dimensions": [{"name": name, "question": text} for name, text in study.dimensions.items()],
                "done": done,
                "total": total,
                "task": asdict(asked[0]) if asked else None,
                "sound": bool(asked) and await asyncio.to_thread(self._sounds, asked[0].left),
                "next": [one for later in asked[1:] for one in (later.left, later.right)],
            }
        )

    def _sounds(self, clip: str) -> bool:
        """True if there is sound: of both clips of a comparison or of none."""
        file = self.store.clip(clip)
        path = None if file is None else clip_file(self.clips, file)
        return path is not None and has_sound(path)

    def _token(self, request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" and OPAQUE.fullmatch(token) else ""

    async def _rater(self, request: Request) -> int:
        token = self._token(request)
        rater = await asyncio.to_thread(self.store.rater_of, token) if token else None
        if rater is None:
            raise self._invalid(request, 401, "This link is not valid.")
        self._limit(f"rater {rater}")
        return rater

    async def _admin(self, request: Request) -> None:
        token = self._token(request)
        if not token or not await asyncio.to_thread(self.store.is_admin, token):
            raise self._invalid(request, 401, "This link is not valid.")

    def _invalid(self, request: Request, status: int, message: str) -> Refused:
        """Limit the rate of invalid tokens of an address; valid tokens behind it are not limited."""
        self._limit(f"address {request.client.host if request.client else ''}")
        return Refused(status, message)

    def _limit(self, name: str) -> None:
        if not self._buckets.take(name):
            raise Refused(429, "Too many requests: wait a moment.")

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise Refused(415, "A vote is application/json.")
        received = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                received.extend(chunk)
                if len(received) > MAX_BODY:
                    raise Refused(413, f"A vote has at most {MAX_BODY} bytes.")

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except TimeoutError as error:
            raise Refused(408, "The vote took too long to arrive.") from error
        except ClientDisconnect as error:
            raise Refused(400, "The connection broke before the vote was complete.") from error
        return bytes(received)

    def _read_vote(self, body: bytes) -> Ballot:
        try:
            content = parse_json(body)
        except ValueError as error:
            raise Refused(400, "The vote is not JSON.") from error
        if fault := misfit(content, Ballot, "the vote"):
            raise Refused(400, f"A vote has task, nonce and answers: {fault}")
        ballot, dimensions = Ballot(**content), self.store.study.dimensions
        if not OPAQUE.fullmatch(ballot.task):
            raise Refused(400, "The task has no such name.")
        if not NONCE.fullmatch(ballot.nonce):
            raise Refused(400, "The nonce is 32 hexadecimal digits.")
        if ballot.answers.keys() != dimensions.keys():
            raise Refused(400, f"Answer each of: {', '.join(dimensions)}.")
        if not set(ballot.answers.values()) <= set(ANSWERS):
            raise Refused(400, f"An answer is one of {', '.join(ANSWERS)}.")
        return ballot


async def _refuse(_request: Request, error: Exception) -> Response:

    status = getattr(error, "status", 500)
    headers = {"Retry-After": "1"} if status == 429 else {}
    if status in (408, 413, 415):  # the body was not read to its end
        headers["Connection"] = "close"
    return JSONResponse({"error": str(error)}, status, headers=headers)


class _Guarded:
    """Adds security headers to every answer, also to those of Starlette."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in there)]
            await send(message)

        await self.app(scope, receive, guarded)


def create_app(store: Store, clips: Path, *, rate: float, burst: int) -> Starlette:
    """The application of a study: `rate` is the requests a second that a rater may make, with `burst` above it at once."""

    server = StudyServer(store, clips, rate=rate, burst=burst)

    def page(file: str, kind: str) -> Callable[[Any], Any]:
        content = (PAGES / file).read_bytes()
        return lambda _request: Response(content, media_type=kind)

    routes = [Route(path, page(*asset), methods=["GET"]) for path, asset in ASSETS.items()]
    routes += [
        Route("/", lambda _request: RedirectResponse("rate"), methods=["GET"]),
        Route("/health", lambda _request: Response("ok", media_type="text/plain"), methods=["GET"]),
        Route("/api/task", server.task, methods=["GET"]),
        Route("/api/vote", server.vote, methods=["POST"]),
        Route("/api/results", server.results, methods=["GET"]),
        Route("/api/votes.csv", server.votes, methods=["GET"]),
        Route("/clip/{name}", server.clip, methods=["GET"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guarded)], exception_handlers={Refused: _refuse})
