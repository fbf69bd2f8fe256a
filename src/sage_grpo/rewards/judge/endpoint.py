"""One OpenAI-compatible endpoint: https, a key from the environment, retries with backoff, Retry-After, and limits."""

from __future__ import annotations

import email.utils
import http.client
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

from sage_grpo.documents import parse_json
from sage_grpo.ranges import Count, Natural, NotNegative, Seconds, checked
from sage_grpo.rewards.asking import Backoff, post, read_address, read_token
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.judge.meter import Meter, Usage
from sage_grpo.secrecy import hide
from sage_grpo.web import is_loopback

TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers after which the same request may succeed."""
HOPELESS = frozenset({401, 403, 404, 405})
"""Answers that every request would get: the key, the model or the address is wrong."""
NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
"""Error codes of a 429 that no waiting cures."""
LARGEST_ANSWER = 4 * 2**20


class EndpointFailure(RuntimeError):
    """A request that brought no answer, after all retries."""


@dataclass(frozen=True)
class Reply:
    """What the model said."""

    text: str
    refusal: str
    """Why it would not say anything; empty when it did."""
    cut: bool
    """Whether the answer ended at the limit of tokens."""


@checked
class Network:
    """How patiently an endpoint is asked."""

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

    def __init__(self, url: str, key_env: str, network: Network, meter: Meter, *, needs_tokens: bool = False) -> None:
        """needs_tokens: refuse an endpoint that does not count tokens, because a limit depends on it."""
        self.url = check_url(url)
        self._key_env, self._network = key_env, network
        self._meter, self._needs_tokens = meter, needs_tokens
        self._backoff = Backoff(network.backoff, network.max_wait)
        self.key()

    def key(self) -> str:
        """The key, read where it is needed and kept nowhere."""
        key = read_token(self._key_env, "key_env")
        if self._key_env and not key:
            raise RewardConfigError(
                f"The environment variable {self._key_env} is empty: put the judge's key there, or set key_env to '' for an "
                "endpoint without one."
            )
        return key

    def ask(self, body: bytes, usage: Usage, stop: threading.Event) -> Reply:
        """Send a request until it is answered; EndpointFailure, Spent or RewardConfigError when it is not. Counts into `usage`."""
        reason = "not sent"
        for attempt in range(self._network.retries + 1):
            if stop.wait(self._meter.reserve()):
                break
            usage.requests += 1
            try:
                status, headers, answer = self._post(body)
            except (OSError, http.client.HTTPException) as error:
                reason, asked = f"{type(error).__name__}: {error}", 0.0
            else:
                if status == 200:
                    try:
                        return self._read(answer, usage)
                    except RewardConfigError:
                        raise
                    except ValueError as error:
                        reason, asked = str(error), 0.0
                else:
                    reason, asked = self._refused(status, headers, answer)
            if attempt < self._network.retries and stop.wait(self._pause(attempt, asked)):
                break
        raise EndpointFailure(self.hide(f"{self._where()}: {reason}"))

    def hide(self, text: str) -> str:
        """A text without the key: servers like to repeat it in their errors."""
        return hide(text, self.key())

    def _where(self) -> str:
        return f"{self.url.scheme}://{self.url.netloc}{self.url.path}"

    def _pause(self, attempt: int, asked: float) -> float:
        """Seconds to the next try: what the server asked for, at least the doubled backoff with jitter."""
        if asked:
            self._meter.hold(asked)  # for everyone: the limit is the account's, not the request's
        return max(asked, self._backoff.pause(attempt))

    def _refused(self, status: int, headers: Mapping[str, str], answer: bytes) -> tuple[str, float]:
        """Why, and how long the server wants to be left alone; raises when the request will never succeed."""
        # hidden before it is cut: the cut must not leave half a key
        text = " ".join(self.hide(answer.decode("utf-8", "replace")).split())[:400]
        reason = f"answered {status}: {text}"
        if status in HOPELESS or 300 <= status < 400:
            more = " Redirects are not followed: give the final address." if status < 400 else ""
            raise RewardConfigError(f"The judge at {self._where()} {reason}.{more} Check url, model and key_env.")
        if status not in TRY_AGAIN or any(code in text for code in NO_MONEY):
            raise EndpointFailure(f"{self._where()} {reason}")
        asked = retry_after(headers, time.time())
        if asked > self._network.max_wait:
            raise EndpointFailure(
                f"{self._where()} asks to wait {asked:g} s, more than max_wait {self._network.max_wait:g}"
            )
        return reason, asked

    def _read(self, answer: bytes, usage: Usage) -> Reply:
        document = parse_json(answer, "its answer")
        try:
            choice = document["choices"][0]
            message, counts = choice["message"], document.get("usage") or {}
            text, refusal = message.get("content") or "", message.get("refusal") or ""
            sent, said = int(counts.get("prompt_tokens") or 0), int(counts.get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            text = self.hide(answer.decode("utf-8", "replace"))[:200]
            raise ValueError(f"answered no chat completion: {text!r}") from error
        if self._needs_tokens and not (sent and "completion_tokens" in counts):  # each has its own price
            raise RewardConfigError(
                "The judge's endpoint does not count tokens, so max_tokens and max_cost cannot be kept: use max_requests."
            )
        self._meter.answered(sent, said)
        usage.input_tokens += sent
        usage.output_tokens += said
        if isinstance(text, list):  # some servers answer in pieces
            text = "".join(str(piece.get("text", "")) for piece in text if isinstance(piece, dict))
        finish = choice.get("finish_reason")
        if finish == "content_filter":
            refusal = refusal or "its content filter stopped the answer"
        return Reply(text=self.hide(str(text)), refusal=self.hide(str(refusal)), cut=finish == "length")

    def _post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        return post(
            self.url,
            "/chat/completions" + (f"?{self.url.query}" if self.url.query else ""),
            [body],
            kind="application/json",
            token=self.key(),
            timeout=self._network.timeout,
            largest=LARGEST_ANSWER,
        )


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
