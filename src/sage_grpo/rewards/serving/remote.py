"""A reward on other machines: choice of the server, retries with backoff, and NaN for clips without a score."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import SplitResult

import torch
from torch import Tensor

from sage_grpo.config.ranges import Range
from sage_grpo.rewards.functions import RewardConfigError, nearest
from sage_grpo.rewards.http_client import Backoff, post, read_address, read_token
from sage_grpo.rewards.serving.wire import WireError, decode_response, encode_request
from sage_grpo.types import PartScores, RewardFacts
from sage_grpo.utils.redact import hide

log = logging.getLogger(__name__)

FORGET = 60.0
"""Half-life in seconds of a server's measured speed: slow ones are tried again now and then."""

UNKNOWN = 5.0
"""Seconds assumed for a server that has not answered yet."""
LONGEST = 600.0
"""Longest pause in seconds for a server that hung."""


@dataclass(eq=False)
class ServerState:
    """State of one server."""

    url: SplitResult
    seconds: float | None = None
    """Seconds of a request, averaged over the last ones; None before the first."""
    measured: float = 0.0
    """Time of that measurement."""
    failures: int = 0
    """Failures since the last success; failures of one moment count once."""
    down_until: float = 0.0
    """Time until which the server gets no requests."""
    running: dict[int, float] = field(default_factory=dict)
    """Its open requests by number, with their starts."""

    def cost(self, now: float, guess: float) -> tuple[float, int]:
        """Expected seconds until one more request is answered, and the number of open requests.

        The age of an open request is a lower bound. A server without any answer costs nothing for its first request, and `guess` for the next ones
        until the first is answered.
        """
        known = guess if self.running else 0.0
        if self.seconds is not None:
            known = self.seconds * 0.5 ** ((now - self.measured) / FORGET)
        expected = max([known, *(now - start for start in self.running.values())])
        return (len(self.running) + 1) * expected, len(self.running)


class ServerPool:
    """The servers of a remote reward. All methods may be called from many threads."""

    def __init__(self, urls: Sequence[SplitResult], backoff: Backoff) -> None:
        self.servers = [ServerState(url) for url in urls]
        self._backoff = backoff
        self._lock = threading.Lock()
        self._turn, self._number = 0, 0

    def acquire(self, avoid: Collection[ServerState] = (), *, patient: bool = False) -> tuple[ServerState, int] | None:
        """The server to ask and the number of the request; None if there is none outside `avoid`.

        A failed server is paused for a time that doubles with every failure, and then gets one request to try. When all are paused, the one whose
        pause ends first is asked, or none if `patient`.
        """
        with self._lock:
            now = time.monotonic()
            self._turn += 1
            first = self._turn % len(self.servers)
            order = [s for s in self.servers[first:] + self.servers[:first] if s not in avoid]
            ready = [s for s in order if s.down_until <= now and not (s.failures and s.running)]
            if not order or (patient and not ready):
                return None
            guess = max((s.seconds for s in ready if s.seconds is not None), default=0.0)
            chosen = min(ready, key=lambda s: s.cost(now, guess)) if ready else min(order, key=lambda s: s.down_until)
            self._number += 1
            chosen.running[self._number] = now
            return chosen, self._number

    def succeeded(self, server: ServerState, number: int) -> None:
        """Record an answered request."""
        with self._lock:
            now = time.monotonic()
            took = now - server.running.pop(number)
            server.seconds = took if server.seconds is None else 0.7 * server.seconds + 0.3 * took
            server.measured, server.failures, server.down_until = now, 0, 0.0

    def busy(self, server: ServerState, number: int) -> None:
        """Record a busy server: it works, but gets a short pause."""
        with self._lock:
            server.running.pop(number)
            server.down_until = max(server.down_until, time.monotonic() + self._backoff.first)

    def dropped(self, server: ServerState, number: int, *, late: bool) -> None:
        """Record an answer that is no longer needed; `late` if another server gave it first, so that this one gained nothing."""
        with self._lock:
            start = server.running.pop(number)
            server.seconds = max(time.monotonic() - start, server.seconds or 0.0)
            if late:
                self._lock_out(server, start, "another server answered its request first")

    def failed(self, server: ServerState, number: int | None, reason: str) -> None:
        """Record a failure: the server hung, or returned nonsense or an error; without a number, an earlier answer was wrong."""
        with self._lock:
            start = time.monotonic() if number is None else server.running.pop(number)
            self._lock_out(server, start, reason)

    def _lock_out(self, server: ServerState, start: float, reason: str) -> None:
        now = time.monotonic()
        if now < server.down_until or (server.failures and start <= server.measured):
            return  # one of many requests that failed together
        # A server that hung is paused for at least as long as it cost.
        pause = max(self._backoff.full(server.failures), min(now - start, LONGEST))
        server.failures, server.down_until, server.measured = server.failures + 1, now + pause, now
        told = "Reward server %s failed (%s): left alone for %.3g s, failure %d in a row."
        log.warning(told, server.url.geturl(), reason[:300], pause, server.failures)

    def quicker(self, waited: float, avoid: Collection[ServerState], factor: float) -> tuple[ServerState, int] | None:
        """A server that could have answered `factor` times in the `waited` seconds that another one has taken; None without one."""
        found = self.acquire(avoid, patient=True)
        if found is None:
            return None
        server, number = found
        with self._lock:
            usual = UNKNOWN if server.seconds is None else server.seconds * len(server.running)
            if waited > factor * usual + 0.01:
                return found
            server.running.pop(number)
        return None


log = logging.getLogger(__name__)

TRY_AGAIN = frozenset({408, 425, 429, 502, 503, 504})
"""Answers after which the same request may succeed."""
LARGEST_ANSWER = 64 * 2**20
LOOKED_AT = 20_000
"""Bytes of an answer without scores from which its first words are taken."""
CONNECT_SECONDS = 10.0
"""Seconds for opening a connection; a machine that takes longer counts as unreachable."""


class RemoteReward:
    """Scores of reward servers (`sage-grpo serve-reward`).

    A batch is cut into requests; each goes to the server with the shortest expected time. A server that fails is paused, longer every time; clips
    that it could not score are tried elsewhere. A request that still fails after all retries marks its clips invalid, so that training goes on
    without them.
    """

    facts = RewardFacts(
        what="rewards that sage-grpo serve-reward hosts elsewhere",
        parts="those of the server that have weights",
        network="clips and prompts go to options.urls",
        licence="those of the server's rewards",
    )

    def __init__(
        self,
        *,
        urls: Sequence[str],
        parts: Sequence[str] = (),
        token_env: str = "SAGE_GRPO_REWARD_TOKEN",
        timeout: float = 300.0,
        retries: int = 8,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        clips_per_request: int = 4,
        parallel: int = 0,
    ) -> None:
        """Prepare; nothing is sent yet.

        parts: names of the scores to ask for (the keys of the weights). token_env: environment variable that holds
        the token; without it no token is sent. timeout: seconds for one try. retries: tries after the first.
        backoff: first pause in seconds, doubled every time up to max_backoff, with jitter. parallel: requests at a
        time, default two a server.
        """
        self._urls = [_parse(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls:
            raise RewardConfigError("The remote reward needs at least one url.")
        if not parts:
            raise RewardConfigError("The remote reward needs weights (or parts): the names of the scores to ask for.")
        for name, value, limit in (
            ("timeout", timeout, Range(0, open_below=True)), ("clips_per_request", clips_per_request, Range(1)),
            ("retries", retries, Range(0)), ("backoff", backoff, Range(0)), ("max_backoff", max_backoff, Range(0)),
            ("parallel", parallel, Range(0)),
        ):  # fmt: skip
            if not limit.holds(value):
                raise RewardConfigError(f"The remote reward's {name} must be {limit}, got {value}.")
        self.names, self._token_env, self._timeout = tuple(parts), token_env, timeout
        self._token()  # refuses an invalid token now
        self._retries, self._backoff = retries, Backoff(backoff, max_backoff)
        self._clips, self._parallel = clips_per_request, parallel or 2 * len(self._urls)
        self._pool = ServerPool(self._urls, self._backoff)

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips; failed requests give NaN and a reason."""
        starts = range(0, len(prompts), self._clips)
        tasks = [_Task(videos[i : i + self._clips], list(prompts[i : i + self._clips]), fps) for i in starts]
        self._score(tasks)
        answers = [task.scores for task in tasks if task.scores is not None]
        assert len(answers) == len(tasks)
        again = sum(max(0, task.tries - 1) for task in tasks)
        if again:
            lost = sum(len(answer.reasons) for answer in answers)
            log.warning("%d reward requests were sent again; %d of %d clips have no score.", again, lost, len(prompts))
        parts = {part: torch.cat([answer[part] for answer in answers]) for part in self.names}
        reasons = {
            start + index: reason for start, answer in zip(starts, answers) for index, reason in answer.reasons.items()
        }
        return PartScores(parts, reasons)

    def _score(self, tasks: Sequence[_Task]) -> None:
        """Run all tasks; a task at a slow server is given to a quick one too, and the first answer counts."""
        stop = threading.Event()
        # Second tries have threads of their own: slow servers may hold all of the first.
        first, second = (ThreadPoolExecutor(max_workers=min(self._parallel, max(1, len(tasks)))) for _ in range(2))
        try:
            running = [first.submit(self._request, task, stop) for task in tasks]
            while waiting := [task for task in tasks if not task.settled.is_set()]:
                for future in running:
                    if future.done():
                        future.result()  # a wrong configuration ends the run
                running = [future for future in running if not future.done()]
                waiting[0].settled.wait(0.05)
                running += [second.submit(self._second, *late) for late in self._late(waiting)]
        finally:
            stop.set()  # after an interrupt no thread may go on retrying
            for task in tasks:
                task.drop()
            for executor in (first, second):
                executor.shutdown(wait=False, cancel_futures=True)  # a thread may still wait for an unreachable machine

    def _late(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, ServerState, int]]:
        """Tasks at a slow server, each with a quicker one; while there is other work, only for a very slow one."""
        now, factor = time.monotonic(), 2.0 if all(task.tries for task in tasks) else 10.0
        for task in tasks:
            server = task.server
            if task.second or server is None:
                continue
            found = self._pool.quicker(now - task.since, [server, *task.refused], factor)
            if found is not None:
                task.second = True
                yield task, *found

    def _request(self, task: _Task, stop: threading.Event) -> None:
        """Send one request, with its retries."""
        for attempt in range(self._retries + 1):
            if attempt and (stop.wait(self._backoff.pause(attempt - 1)) or task.settled.is_set()):
                break
            found = self._pool.acquire(task.refused)
            if found is None:
                break
            task.tries += 1
            task.since, task.server = time.monotonic(), found[0]
            scores = self._try(task, *found)
            task.server = None
            if scores is not None:
                task.settle(self._elsewhere(task, scores, found[0]))
                return
            if stop.is_set():
                break
        while task.second and not task.settled.wait(0.05):
            pass  # the second try may still bring scores
        empty = {part: torch.full((len(task.prompts),), torch.nan) for part in self.names}
        task.settle(PartScores(empty, dict.fromkeys(range(len(task.prompts)), task.reason)))

    def _second(self, task: _Task, server: ServerState, number: int) -> None:
        """Try a second server beside the first; if it fails, the first goes on alone."""
        task.tries += 1
        scores = self._try(task, server, number, second=True)
        task.second = False
        if scores is not None:
            task.settle(scores)

    def _token(self) -> str:
        """The token, read from the environment on each use and never stored; empty without one."""
        return read_token(self._token_env, "The remote reward's token_env")

    def _said(self, text: str) -> str:
        """A server's text without the token, which some servers repeat. Call it before cutting the text, which could leave half a token."""
        return hide(text, self._token())

    def _try(self, task: _Task, server: ServerState, number: int, *, second: bool = False) -> PartScores | None:
        """Ask one server once; None when the request has to be tried again, here or elsewhere. A `second` try may lose to the first."""
        where, (body, checksum) = server.url.geturl(), task.encoded
        try:
            status, _, answer = post(
                server.url,
                "/score",
                body,
                kind="application/octet-stream",
                token=self._token(),
                timeout=self._timeout,
                connect_timeout=CONNECT_SECONDS,
                largest=LARGEST_ANSWER,
                watched=task.holding,
            )
            if status == 200:
                scores = decode_response(answer, request_id=task.id, checksum=checksum, count=len(task.prompts))
                self._pool.succeeded(server, number)
                return self._chosen(scores)
        except (OSError, http.client.HTTPException, WireError) as error:
            if task.cut:
                self._pool.dropped(server, number, late=task.settled.is_set() and not second)
                return None
            told = self._said(f"{type(error).__name__}: {error}")
            task.reason = f"{where}: {told}"
            self._pool.failed(server, number, told)
            return None
        text = self._said(answer[:LOOKED_AT].decode("utf-8", "replace"))[:500]
        task.reason = f"{where} answered {status}: {text}"
        if status in (429, 503):
            self._pool.busy(server, number)
        else:
            self._pool.failed(server, number, f"it answered {status}: {text}")
        if status not in TRY_AGAIN:
            task.refused.append(server)  # this server will always refuse the request; another one may accept it
        return None

    def _elsewhere(self, task: _Task, scores: PartScores, server: ServerState) -> PartScores:
        """Ask one other server for the clips that this one could not score: it may be the server's fault, not the clips'."""
        bad = [i for i in range(len(task.prompts)) if not all(bool(scores[part][i].isfinite()) for part in self.names)]
        found = self._pool.acquire([server, *task.refused], patient=True) if bad else None
        if found is None:
            return scores
        rest = task.rest = _Task(task.videos[bad], [task.prompts[i] for i in bad], task.fps)
        task.tries += 1
        second = self._try(rest, *found)
        if second is None:
            return scores
        parts, reasons = {part: scores[part].clone() for part in self.names}, dict(scores.reasons)
        for place, index in enumerate(bad):
            if all(bool(second[part][place].isfinite()) for part in self.names):
                for part in self.names:
                    parts[part][index] = second[part][place]
                reason = reasons.pop(index, "no reason given")
                self._pool.failed(server, None, f"it could not score a clip that another server could: {reason}")
        return PartScores(parts, reasons)

    def _chosen(self, scores: PartScores) -> PartScores:
        for part in self.names:
            if part not in scores:
                near = self._said(nearest(part, scores))
                raise RewardConfigError(f"The reward server has no part {part!r}.{near}")
        reasons = {index: self._said(reason) for index, reason in scores.reasons.items()}
        return PartScores({part: scores[part] for part in self.names}, reasons)


class _Task:
    """The clips of one request, with the state of its tries."""

    def __init__(self, videos: Tensor, prompts: list[str], fps: float) -> None:
        self.videos, self.prompts, self.fps = videos, prompts, fps
        self.id = uuid.uuid4().hex
        self.tries = 0
        self.reason = "not tried"
        self.refused: list[ServerState] = []
        """Servers that will never answer it."""
        self.server: ServerState | None = None
        """The server that has it, since the time `since`."""
        self.since = 0.0
        self.second = False
        """True if a second server has it too."""
        self.rest: _Task | None = None
        """The clips that are tried elsewhere."""
        self.scores: PartScores | None = None
        self.settled = threading.Event()
        self.cut = False
        self._lock = threading.Lock()
        self._connections: list[http.client.HTTPConnection] = []

    @cached_property
    def encoded(self) -> tuple[list[bytes | memoryview], str]:
        """The body to send, and the checksum that the answer must repeat."""
        return encode_request(self.videos, self.prompts, self.fps, self.id)

    def settle(self, scores: PartScores) -> None:
        """Keep the first result, and cut the connections of other tries."""
        with self._lock:
            if self.settled.is_set():
                return
            self.scores = scores
            self.settled.set()
        self.drop()

    @contextlib.contextmanager
    def holding(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Keep an open connection, so that it can be cut."""
        with self._lock:
            if self.cut:
                raise ConnectionAbortedError("The answer is no longer needed.")
            self._connections.append(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections = [one for one in self._connections if one is not connection]

    def drop(self) -> None:
        """Cut the connections: their threads wake up, and the servers notice that the client is gone."""
        if self.rest is not None:
            self.rest.drop()
        with self._lock:
            self.cut = True
            for connection in self._connections:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)


def _parse(url: str) -> SplitResult:
    parsed = read_address(url, "A reward server's url", "http://host:8765", "token_env")
    if parsed.query or parsed.fragment:  # clips are sent to the url's path alone
        raise RewardConfigError(f"A reward server's url ends with its path: leave out what follows {parsed.path!r}.")
    return parsed
