"""A reward on another machine: retries with backoff, several servers, and NaN for what could not be scored."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urlsplit

import torch
from torch import Tensor

from sage_grpo.rewards.functions import PartScores, RewardConfigError, nearest
from sage_grpo.rewards.wire import WireError, decode_response, encode_request

TRY_AGAIN = frozenset({408, 425, 429, 502, 503, 504})
"""Answers after which the same request may succeed."""
LARGEST_ANSWER = 64 * 2**20


class RemoteReward:
    """Scores that reward servers give (`sage-grpo serve-reward`).

    A batch is cut into requests that go to the servers in turn; a server that fails is left alone for a while. A
    request that still fails after all retries marks its clips invalid, so that training goes on without them.
    """

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
        if min(timeout, clips_per_request) <= 0 or min(retries, backoff, max_backoff, parallel) < 0:
            raise RewardConfigError("timeout and clips_per_request must be positive, the other numbers not negative.")
        self._parts, self._token_env, self._timeout = tuple(parts), token_env, timeout
        self._retries, self._backoff, self._max_backoff = retries, backoff, max_backoff
        self._clips, self._parallel = clips_per_request, parallel or 2 * len(self._urls)
        self._turn = itertools.count()
        self._jitter = random.Random()  # its own: the run's random numbers must not depend on the network
        self._down_until = [0.0] * len(self._urls)

    @property
    def names(self) -> tuple[str, ...]:
        """The scores asked for."""
        return self._parts

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips; failed requests give NaN and a reason."""
        starts = range(0, len(prompts), self._clips)
        stop = threading.Event()
        executor = ThreadPoolExecutor(max_workers=min(self._parallel, max(1, len(starts))))
        try:
            chunks = [(videos[i : i + self._clips], list(prompts[i : i + self._clips])) for i in starts]
            answers = list(executor.map(lambda chunk: self._request(*chunk, fps, stop), chunks))
        finally:
            stop.set()  # after an interrupt no thread shall go on retrying
            executor.shutdown(cancel_futures=True)
        parts = {part: torch.cat([answer[part] for answer in answers]) for part in self._parts}
        reasons = {
            start + index: reason for start, answer in zip(starts, answers) for index, reason in answer.reasons.items()
        }
        return PartScores(parts, reasons)

    def _request(self, videos: Tensor, prompts: list[str], fps: float, stop: threading.Event) -> PartScores:
        """One request with its retries."""
        request_id = uuid.uuid4().hex
        body, checksum = encode_request(videos, prompts, fps, request_id)
        reason = "not tried"
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(self._max_backoff, self._backoff * 2 ** (attempt - 1)) * self._jitter.uniform(0.5, 1.0)
                if stop.wait(pause):
                    break
            index = self._choose()
            try:
                status, answer = self._post(self._urls[index], body)
                if status == 200:
                    scores = decode_response(answer, request_id=request_id, checksum=checksum, count=len(prompts))
                    return self._chosen(scores)
            except (OSError, http.client.HTTPException, WireError) as error:
                reason = f"{self._urls[index].geturl()}: {type(error).__name__}: {error}"
                self._down_until[index] = time.monotonic() + self._backoff * 2 ** min(attempt, 5)
                continue
            text = answer[:500].decode("utf-8", "replace")
            reason = f"{self._urls[index].geturl()} answered {status}: {text}"
            if status not in TRY_AGAIN:
                break
        empty = {part: torch.full((len(prompts),), torch.nan) for part in self._parts}
        return PartScores(empty, dict.fromkeys(range(len(prompts)), reason))

    def _chosen(self, scores: PartScores) -> PartScores:
        for part in self._parts:
            if part not in scores:
                raise RewardConfigError(f"The reward server has no part {part!r}.{nearest(part, scores)}")
        return PartScores({part: scores[part] for part in self._parts}, scores.reasons)

    def _choose(self) -> int:
        """The next server in turn, one that did not just fail if there is any."""
        first, now = next(self._turn), time.monotonic()
        order = [(first + step) % len(self._urls) for step in range(len(self._urls))]
        return next((index for index in order if self._down_until[index] <= now), order[0])

    def _post(self, url: SplitResult, body: list[bytes | memoryview]) -> tuple[int, bytes]:
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port or (443 if secure else 80), timeout=self._timeout)
        headers = {"Content-Type": "application/octet-stream", "Connection": "close"}
        headers["Content-Length"] = str(sum(len(piece) for piece in body))
        token = os.environ.get(self._token_env, "").strip()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        deadline = time.monotonic() + self._timeout
        try:
            connection.connect()
            # a server may refuse the body early and close: its answer still says why
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", f"{url.path.rstrip('/')}/score", body=body, headers=headers)
            response = connection.getresponse()
            answer = bytearray()
            while chunk := response.read1(65536):
                answer += chunk
                if len(answer) > LARGEST_ANSWER or time.monotonic() > deadline:
                    raise WireError("The answer is too large or too slow.")
            if response.length:  # fewer bytes than announced
                raise WireError(f"The answer broke off, {response.length} bytes are missing.")
            return response.status, bytes(answer)
        finally:
            connection.close()


def _parse(url: str) -> SplitResult:
    parsed = urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise RewardConfigError(f"A reward server's url looks like http://host:8765, got {url!r}.")
    if parsed.username or parsed.password:
        raise RewardConfigError("A url must not hold a password: put the token into an environment variable.")
    return parsed
