"""A reward on other machines: choice of the server, retries with backoff, and NaN for clips without a score."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from urllib.parse import SplitResult

import torch
from torch import Tensor

from sage_grpo.rewards.functions import RewardConfigError, nearest
from sage_grpo.rewards.http_client import Connections, RetryOptions, post, read_group
from sage_grpo.rewards.serving.wire import WireError, decode_response, encode_request
from sage_grpo.types import PartScores, RewardFacts
from sage_grpo.utils.redact import hide, parse_address, read_key

log = logging.getLogger(__name__)

TRY_AGAIN = {408, 425, 429, 502, 503, 504}
"""Answers after which the same request may succeed."""
LARGEST_ANSWER = 64 * 2**20


@dataclass(eq=False)
class ServerState:
    """State of one server. Times are of time.monotonic."""

    url: SplitResult
    open: int = 0  # requests that it has not answered yet
    failures: int = 0  # failures since the last success; failures of one moment count once
    changed: float = 0.0  # last success or failure
    down_until: float = 0.0


class ServerPool:
    """The servers of a remote reward. All methods may be called from many threads."""

    def __init__(self, urls: Sequence[SplitResult], network: RetryOptions) -> None:
        self.servers = [ServerState(url) for url in urls]
        self._network = network
        self._lock = threading.Lock()
        self._turn = 0

    def acquire(self, avoid: Collection[ServerState] = ()) -> ServerState | None:
        """The server with the fewest open requests; None if there is none outside `avoid`.

        A failed server is paused for a time that doubles with every failure, and then gets one request to try. When all are paused, the one whose
        pause ends first is asked.
        """
        with self._lock:
            now = time.monotonic()
            self._turn += 1
            first = self._turn % len(self.servers)
            order = [s for s in self.servers[first:] + self.servers[:first] if s not in avoid]
            ready = [s for s in order if s.down_until <= now and not (s.failures and s.open)]
            if not order:
                return None
            chosen = min(ready, key=lambda s: s.open) if ready else min(order, key=lambda s: s.down_until)
            chosen.open += 1
            return chosen

    def succeeded(self, server: ServerState) -> None:
        with self._lock:
            server.open -= 1
            server.changed, server.failures, server.down_until = time.monotonic(), 0, 0.0

    def busy(self, server: ServerState) -> None:
        """A busy server works, but gets a short pause."""
        with self._lock:
            server.open -= 1
            server.down_until = max(server.down_until, time.monotonic() + self._network.backoff)

    def failed(self, server: ServerState, start: float, reason: str) -> None:
        """A request sent at `start` failed: the server hung, or returned nonsense or an error."""
        with self._lock:
            server.open -= 1
            now = time.monotonic()
            if now < server.down_until or (server.failures and start <= server.changed):
                return  # one of many requests that failed together
            # A server that hung is paused for at least as long as it cost.
            pause = max(self._network.longest_pause(server.failures), now - start)
            server.failures, server.down_until, server.changed = server.failures + 1, now + pause, now
        message = "Reward server %s failed (%s): not used for %.3g s, failure %d in a row."
        log.warning(message, server.url.geturl(), reason[:300], pause, server.failures)


class RemoteReward:
    """Scores of reward servers (`sage-grpo serve-reward`).

    A batch is cut into requests; each goes to the server with the fewest open ones. A server that fails is paused, longer every time. A request
    that still fails after all retries marks its clips invalid, so that training goes on without them.
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

        parts: names of the scores to ask for (the keys of the weights). token_env: environment variable that holds the token; without it no token is
        sent. timeout: seconds for one try. retries: tries after the first. backoff: first pause in seconds, doubled every time up to max_backoff, with
        jitter. parallel: requests at a time, default two a server.
        """
        given, example = [urls] if isinstance(urls, str) else urls, "http://host:8765"
        addresses = [parse_address(url, "A reward server's url", example, "token_env") for url in given]
        if not addresses:
            raise RewardConfigError("The remote reward needs at least one url.")
        for one in addresses:
            if one.query or one.fragment:  # clips are sent to the url's path alone
                raise RewardConfigError(
                    f"A reward server's url ends with its path: leave out what follows {one.path!r}."
                )
        if not parts:
            raise RewardConfigError("The remote reward needs weights (or parts): the names of the scores to ask for.")
        if clips_per_request < 1:
            raise RewardConfigError(
                f"The remote reward's clips_per_request must be at least 1, got {clips_per_request}."
            )
        network = {"timeout": timeout, "retries": retries, "backoff": backoff, "max_wait": max_backoff}
        network["parallel"] = parallel or 2 * len(addresses)
        self._network, self._clips = read_group(RetryOptions, "The remote reward", network), clips_per_request
        self.names, self._token_env = tuple(parts), token_env
        self._token()  # refuses an invalid token now
        self._pool = ServerPool(addresses, self._network)

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        starts = range(0, len(prompts), self._clips)
        pieces = [(videos[i : i + self._clips], prompts[i : i + self._clips]) for i in starts]
        with ThreadPoolExecutor(self._network.parallel) as executor, Connections() as connections:
            requests = [executor.submit(self._request, *piece, fps, connections) for piece in pieces]
            done, _ = wait(requests, return_when=FIRST_EXCEPTION)
            for request in done:
                request.result()  # a wrong configuration ends the run, also while another request hangs
            answers = [request.result() for request in requests]
        parts = {part: torch.cat([scores[part] for scores in answers]) for part in self.names}
        reasons = {at + i: reason for at, scores in zip(starts, answers) for i, reason in scores.reasons.items()}
        return PartScores(parts, reasons)

    def _request(self, videos: Tensor, prompts: Sequence[str], fps: float, connections: Connections) -> PartScores:
        body, checksum = encode_request(videos, prompts, fps)
        refused, reason = list[ServerState](), "not tried"
        for attempt in range(self._network.retries + 1):
            if connections.stop.wait(self._network.pause(attempt - 1) if attempt else 0):
                break
            server = self._pool.acquire(refused)
            if server is None:
                break
            start = time.monotonic()
            try:
                status, _, answer = post(
                    server.url,
                    "/score",
                    body,
                    kind="application/octet-stream",
                    token=self._token(),
                    timeout=self._network.timeout,
                    largest=LARGEST_ANSWER,
                    connections=connections,
                )
                if status == 200:
                    scores = decode_response(answer, checksum=checksum, count=len(prompts))
                    self._pool.succeeded(server)
                    return self._chosen(scores)
            except (OSError, http.client.HTTPException, WireError) as error:
                fault = self._hidden(f"{type(error).__name__}: {error}")
                reason = f"{server.url.geturl()}: {fault}"
                self._pool.failed(server, start, fault)
                continue
            fault = f"answered {status}: {self._hidden(answer[:20_000].decode('utf-8', 'replace'))[:500]}"
            reason = f"{server.url.geturl()} {fault}"
            if status in (429, 503):
                self._pool.busy(server)
            else:
                self._pool.failed(server, start, f"it {fault}")
            if status not in TRY_AGAIN:
                refused.append(server)  # this server will always refuse the request; another one may accept it
        missing = {part: torch.full((len(prompts),), torch.nan) for part in self.names}
        return PartScores(missing, dict.fromkeys(range(len(prompts)), reason))

    def _token(self) -> str:
        return read_key(self._token_env, "The remote reward's token_env") if self._token_env else ""

    def _hidden(self, text: str) -> str:
        """Without the token, which some servers repeat. Called before the text is cut, which could leave half a token."""
        return hide(text, self._token())

    def _chosen(self, scores: PartScores) -> PartScores:
        for part in self.names:
            if part not in scores:
                near = self._hidden(nearest(part, scores))
                raise RewardConfigError(f"The reward server has no part {part!r}.{near}")
        reasons = {index: self._hidden(reason) for index, reason in scores.reasons.items()}
        return PartScores({part: scores[part] for part in self.names}, reasons)
