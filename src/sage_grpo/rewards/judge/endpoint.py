"""One OpenAI-compatible endpoint: requests (https, a key from the environment, retries), their cost, and a cache of answers."""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from sage_grpo.config.ranges import Count, Natural, NotNegative, Seconds, checked
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.http_client import Backoff, Connections, post, read_address, read_token
from sage_grpo.utils.http_server import is_loopback
from sage_grpo.utils.json_schema import parse_json
from sage_grpo.utils.redact import hide


class Spent(RuntimeError):
    """A limit of the run is reached: no further request is sent."""


@dataclass
class Usage:
    """Requests that were sent and tokens that the endpoint counted."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.requests += other.requests
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens


@checked
class Limits:
    """Spending limits of one process; 0 is no limit."""

    requests_per_minute: NotNegative = 0.0
    """Requests are sent evenly, at most so many a minute."""
    max_requests: Natural = 0
    """Requests in all, retries included."""
    max_tokens: Natural = 0
    """Input and output together."""
    max_cost: NotNegative = 0.0
    """In the currency of the prices."""
    input_price: NotNegative = 0.0
    """For a million tokens that are sent."""
    output_price: NotNegative = 0.0
    """For a million tokens that are answered."""

    def __post_init__(self) -> None:
        if self.max_cost and not (self.input_price or self.output_price):
            raise ValueError("limits.max_cost needs input_price and output_price, for a million tokens.")


class Meter:
    """Counts and limits; all methods may be called from many threads."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self.used = Usage()
        """Usage by this process, and by earlier ones of the same run."""
        self.cached = 0
        self._next = 0.0
        self._lock = threading.Lock()

    @property
    def cost(self) -> float:
        used, limits = self.used, self._limits
        return (used.input_tokens * limits.input_price + used.output_tokens * limits.output_price) / 1_000_000

    def reserve(self) -> float:
        """Count one request and return how many seconds it has to wait for its turn; Spent when there is nothing left.

        Tokens are known only afterwards: requests that are under way when a limit of tokens or cost is reached still count on top.
        """
        limits = self._limits
        with self._lock:
            tokens = self.used.input_tokens + self.used.output_tokens
            for name, value, most in (
                ("max_requests", self.used.requests, limits.max_requests),
                ("max_tokens", tokens, limits.max_tokens),
                ("max_cost", self.cost, limits.max_cost),
            ):
                if most and value >= most:
                    raise Spent(f"the judge's {name} of {most:g} is spent ({self.describe()})")
            self.used.requests += 1
            now = self._clock()
            turn = max(now, self._next)
            self._next = turn + (60 / limits.requests_per_minute if limits.requests_per_minute else 0.0)
            return turn - now

    def answered(self, tokens: Usage) -> None:
        with self._lock:
            self.used.add(tokens)

    def hold(self, seconds: float) -> None:
        """Delay all requests: the endpoint asked for a pause."""
        with self._lock:
            self._next = max(self._next, self._clock() + seconds)

    def found(self) -> None:
        with self._lock:
            self.cached += 1

    def describe(self) -> str:
        used, limits = self.used, self._limits
        text = f"{used.requests:,} requests, {used.input_tokens:,} + {used.output_tokens:,} tokens"
        if limits.input_price or limits.output_price:
            text += f", cost {self.cost:,.4f}"
        return f"{text}, {self.cached:,} scores from the cache"


TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers after which the same request may succeed."""
HOPELESS = frozenset({401, 403, 404, 405})
"""Answers that every request would get: the key, the model or the address is wrong."""
NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
"""Error codes of a 429 that no retry cures."""
LARGEST_ANSWER = 4 * 2**20


class EndpointFailure(RuntimeError):
    """A request that brought no answer, after all retries."""


class NoAnswer(ValueError):
    """The response is not a chat completion."""


@dataclass(frozen=True)
class Reply:
    """The model's answer."""

    text: str
    refusal: str
    """The reason of a refusal; empty without one."""
    cut: bool
    """True if the answer ended at the limit of tokens."""


@checked
class RetryOptions:
    """Timeouts, retries and parallel requests of an endpoint."""

    timeout: Seconds = 120.0
    """Seconds for one try."""
    retries: Natural = 5
    """Tries after the first."""
    backoff: NotNegative = 1.0
    """First pause in seconds, doubled every time up to max_wait, with jitter."""
    max_wait: NotNegative = 120.0
    """Longest pause; a server that asks for a longer one is given up."""
    parallel: Count = 4
    """Requests at a time."""


class Endpoint:
    """POST url/chat/completions."""

    def __init__(
        self, url: str, key_env: str, network: RetryOptions, meter: Meter, *, needs_tokens: bool = False
    ) -> None:
        """needs_tokens: refuse an endpoint that does not count tokens, because a limit depends on it."""
        self.url = check_url(url)
        self._where = f"{self.url.scheme}://{self.url.netloc}{self.url.path}"
        self._key_env, self._network = key_env, network
        self._meter, self._needs_tokens = meter, needs_tokens
        self._backoff = Backoff(network.backoff, network.max_wait)
        self.key()

    def key(self) -> str:
        """The key, read from the environment on each use and never stored."""
        key = read_token(self._key_env, "key_env")
        if self._key_env and not key:
            raise RewardConfigError(
                f"The environment variable {self._key_env} is empty: put the judge's key there, or set key_env to '' for an "
                "endpoint without one."
            )
        return key

    def ask(self, body: bytes, usage: Usage, connections: Connections) -> Reply:
        """Send a request until it is answered; EndpointFailure, Spent or RewardConfigError when it is not. Counts into `usage`."""
        reason = "not sent"
        for attempt in range(self._network.retries + 1):
            if connections.stop.wait(self._meter.reserve()):
                break
            usage.requests += 1
            try:
                status, headers, answer = post(
                    self.url,
                    "/chat/completions" + (f"?{self.url.query}" if self.url.query else ""),
                    [body],
                    kind="application/json",
                    token=self.key(),
                    timeout=self._network.timeout,
                    largest=LARGEST_ANSWER,
                    connections=connections,
                )
                if status == 200:
                    return self._read(answer, usage)
                reason, asked = self._refused(status, headers, answer)
            except (OSError, http.client.HTTPException) as error:
                reason, asked = f"{type(error).__name__}: {error}", 0.0
            except NoAnswer as error:
                reason, asked = str(error), 0.0
            if attempt == self._network.retries:
                break
            if asked:
                self._meter.hold(asked)  # for all threads: the limit is the account's, not the request's
            if connections.stop.wait(max(asked, self._backoff.pause(attempt))):
                break
        raise EndpointFailure(self.hide(f"{self._where}: {reason}"))

    def hide(self, text: str) -> str:
        """A text without the key, which some servers repeat in their errors."""
        return hide(text, self.key())

    def _refused(self, status: int, headers: Mapping[str, str], answer: bytes) -> tuple[str, float]:
        """The reason, and the pause in seconds that the server asks for; raises when the request will never succeed."""
        # hidden before it is cut: the cut must not leave half a key
        text = " ".join(self.hide(answer.decode("utf-8", "replace")).split())[:400]
        reason = f"answered {status}: {text}"
        if status in HOPELESS or 300 <= status < 400:
            more = " Redirects are not followed: give the final address." if status < 400 else ""
            raise RewardConfigError(f"The judge at {self._where} {reason}.{more} Check url, model and key_env.")
        if status not in TRY_AGAIN or any(code in text for code in NO_MONEY):
            raise EndpointFailure(f"{self._where} {reason}")
        asked = retry_after(headers, time.time())
        if asked > self._network.max_wait:
            raise EndpointFailure(
                f"{self._where} asks to wait {asked:g} s, more than max_wait {self._network.max_wait:g}"
            )
        return reason, asked

    def _read(self, answer: bytes, usage: Usage) -> Reply:
        try:
            document = parse_json(answer, "its answer")
            choice = document["choices"][0]
            message, counts = choice["message"], document.get("usage") or {}
            text, refusal = message.get("content") or "", message.get("refusal") or ""
            sent, answered_tokens = int(counts.get("prompt_tokens") or 0), int(counts.get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            text = self.hide(answer.decode("utf-8", "replace"))[:200]
            raise NoAnswer(f"answered no chat completion: {text!r}") from error
        if self._needs_tokens and not (sent and "completion_tokens" in counts):  # each has its own price
            raise RewardConfigError(
                "The judge's endpoint does not count tokens, so max_tokens and max_cost cannot be kept: use max_requests."
            )
        tokens = Usage(input_tokens=sent, output_tokens=answered_tokens)
        self._meter.answered(tokens)
        usage.add(tokens)
        if isinstance(text, list):  # some servers answer in pieces
            text = "".join(str(piece.get("text", "")) for piece in text if isinstance(piece, dict))
        finish = choice.get("finish_reason")
        if finish == "content_filter":
            refusal = refusal or "its content filter stopped the answer"
        return Reply(text=self.hide(str(text)), refusal=self.hide(str(refusal)), cut=finish == "length")


def check_url(url: str) -> SplitResult:
    """The address, if clips and a key may be sent there: https, or plain http on this machine."""
    parsed = read_address(url, "The judge's url", "https://host/v1", "key_env")
    if parsed.scheme == "http" and not is_loopback(parsed.hostname or ""):
        raise RewardConfigError(
            f"The judge at {parsed.hostname} needs https: plain http would show clips and key to the network. Only this "
            "machine (127.0.0.1, localhost) may do without; an SSH tunnel brings another one there."
        )
    return parsed


def retry_after(headers: Mapping[str, Any], now: float) -> float:
    """Seconds that an answer asks to wait: a number or a date; 0 when it does not."""
    text = str(headers.get("retry-after", "")).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError):
        return 0.0


log = logging.getLogger(__name__)


class Ledger:
    """Known scores by digest. Without a folder it lasts as long as the process."""

    def __init__(self, folder: str, parts: Sequence[str]) -> None:
        self.spent = Usage()
        """Usage of all earlier processes."""
        self._known: dict[str, tuple[dict[str, float], dict[str, str]]] = {}
        self._parts, self._lock = tuple(parts), threading.Lock()
        self._file: Path | None = None
        if folder:
            place = Path(folder).expanduser()
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RewardConfigError(f"The judge's cache {place} cannot be a folder: {error}.") from error
            for file in sorted(place.glob("judge-*.jsonl")):
                self._read(file)
            self._file = place / f"judge-{uuid.uuid4().hex}.jsonl"

    def find(self, digest: str) -> tuple[dict[str, float], dict[str, str]] | None:
        with self._lock:
            return self._known.get(digest)

    def keep(self, digest: str, scores: Mapping[str, float], reasons: Mapping[str, str], usage: Usage) -> None:
        """Record a finished request; without scores only its cost."""
        line: dict[str, Any] = {"digest": digest, "scores": dict(scores), "reasons": dict(reasons), **asdict(usage)}
        with self._lock:
            if scores:
                self._known[digest] = (dict(scores), dict(reasons))
            if self._file is None:
                return
            try:
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line, allow_nan=False) + "\n")
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:  # a full disk must not cost the scores; the run goes on and may pay again
                log.warning("The judge's cache %s cannot be written: %s", self._file, error)

    def _read(self, file: Path) -> None:
        """Read the lines of a file; a process that was killed leaves an incomplete last line."""
        torn = 0
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = parse_json(text)
                usage = Usage(*(int(line[name]) for name in ("requests", "input_tokens", "output_tokens")))
                scores = {str(part): float(value) for part, value in line["scores"].items()}
                reasons = {str(part): str(reason) for part, reason in line["reasons"].items()}
                digest = str(line["digest"])
            except (ValueError, KeyError, TypeError, AttributeError):
                torn += 1
                continue
            self.spent.add(usage)
            if set(self._parts) <= set(scores) and all(math.isfinite(value) for value in scores.values()):
                self._known[digest] = (scores, reasons)
        if torn:
            log.warning("%d lines of the judge's cache %s cannot be read and are paid for again.", torn, file)
