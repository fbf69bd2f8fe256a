"""What a judge has cost, what it may still cost, and when the next request may go out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sage_grpo.ranges import Natural, NotNegative, checked


class Spent(RuntimeError):
    """A limit of the run is reached: no further request goes out."""


@dataclass
class Usage:
    """Requests that were sent and tokens that the endpoint counted."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Usage) -> None:
        """Sum up."""
        self.requests += other.requests
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens


@checked
class Limits:
    """What one process may spend; 0 is no limit."""

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

    def __init__(
        self, limits: Limits, before: Usage | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """before: what earlier processes of the same run have spent."""
        self._limits, self._clock = limits, clock
        self.used = before or Usage()
        self.cached = 0
        self._next = 0.0
        self._lock = threading.Lock()

    @property
    def cost(self) -> float:
        """What was spent, by the prices."""
        used = self.used
        return (
            used.input_tokens * self._limits.input_price + used.output_tokens * self._limits.output_price
        ) / 1_000_000

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

    def answered(self, input_tokens: int, output_tokens: int) -> None:
        """Count the tokens of an answer."""
        with self._lock:
            self.used.input_tokens += input_tokens
            self.used.output_tokens += output_tokens

    def hold(self, seconds: float) -> None:
        """The endpoint wants to be left alone: nobody's turn comes earlier."""
        with self._lock:
            self._next = max(self._next, self._clock() + seconds)

    def found(self) -> None:
        """A score came from the cache."""
        with self._lock:
            self.cached += 1

    def describe(self) -> str:
        """The counts in one line."""
        used, limits = self.used, self._limits
        text = f"{used.requests:,} requests, {used.input_tokens:,} + {used.output_tokens:,} tokens"
        if limits.input_price or limits.output_price:
            text += f", cost {self.cost:,.4f}"
        return f"{text}, {self.cached:,} scores from the cache"
