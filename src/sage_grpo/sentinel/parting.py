"""What the sentinel remembers of a witness: its agreement with the total within groups, and earlier evaluations. JSON goes in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sage_grpo.sentinel.paired import Change, Column
from sage_grpo.sentinel.signs import Row

AGREEMENT = "reward/agreement/"
STDERR = "reward/agreement_stderr/"


class Tally(NamedTuple):
    """Agreements of some iterations, added up."""

    iterations: int = 0
    total: float = 0.0
    variance: float = 0.0

    def plus(self, other: Tally) -> Tally:
        """Those of both."""
        return Tally(self.iterations + other.iterations, self.total + other.total, self.variance + other.variance)

    def minus(self, other: Tally) -> Tally:
        """Without those of an earlier moment."""
        return Tally(self.iterations - other.iterations, self.total - other.total, self.variance - other.variance)

    @property
    def mean(self) -> float:
        """Mean agreement of an iteration."""
        return self.total / max(1, self.iterations)

    @property
    def stderr(self) -> float:
        """Its standard error; every iteration has other prompts and noises."""
        return math.sqrt(max(0.0, self.variance)) / self.iterations if self.iterations else math.inf

    def to(self, later: Tally) -> Change | None:
        """How far it has dropped since; None where one of the two has no iteration."""
        if not self.iterations or not later.iterations:
            return None
        return Change(self.mean - later.mean, math.hypot(self.stderr, later.stderr))


@dataclass(frozen=True)
class Remembered:
    """What the sentinel remembers of an evaluation."""

    scores: Mapping[str, Column]
    """Of every clip: the total, and every witness."""
    agreement: Mapping[str, Tally] = field(default_factory=dict)
    """Of the iterations until then."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "scores": {title: list(column) for title, column in self.scores.items()},
            "agreement": {title: list(own) for title, own in self.agreement.items()},
        }


def tally(rows: Sequence[Row], title: str) -> Tally:
    """Add up the agreements of a witness in these rows."""
    found = [(row.get(AGREEMENT + title), row.get(STDERR + title)) for row in rows]
    pairs = [(mean, stderr) for mean, stderr in found if mean is not None and stderr is not None]
    return Tally(len(pairs), math.fsum(mean for mean, _ in pairs), math.fsum(stderr**2 for _, stderr in pairs))


def tallies(state: Mapping[str, Sequence[float]]) -> dict[str, Tally]:
    """From JSON."""
    return {title: Tally(int(count), total, variance) for title, (count, total, variance) in state.items()}


def evidence(held_out: Change, drop: Change | None) -> float:
    """In standard errors: what held-out clips say and what training's groups say together, which share no clip; or the first alone."""
    return held_out.sigmas if drop is None else (held_out.sigmas + drop.sigmas) / math.sqrt(2)


def in_words(before: Tally, since: Tally) -> str:
    """How the agreement changed, as the end of a sentence; empty where one of the two is not known."""
    if not before.iterations or not since.iterations:
        return ""
    return f" (agreement within groups {before.mean:.2f} +- {before.stderr:.2g} before, {since.mean:.2f} +- {since.stderr:.2g} since)"
