"""The pairs of videos of each rater, their sides and their order: pure, from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

Kind = Literal["pair", "same", "degraded"]


class Comparison(NamedTuple):
    """Two methods on one prompt, by index; first < second unless the study compares with one method."""

    prompt: int
    first: int
    second: int


class Shown(NamedTuple):
    """A clip for a rater: the clip of a method, or a spoilt copy of it."""

    method: int
    degraded: bool = False


@dataclass(frozen=True)
class Task:
    """One question to a rater."""

    prompt: int
    left: Shown
    right: Shown

    @property
    def kind(self) -> Kind:
        """A comparison of methods, or an attention check: a clip with itself, or with a spoilt copy."""
        if self.left == self.right:
            return "same"
        return "degraded" if self.left.degraded or self.right.degraded else "pair"

    @property
    def identity(self) -> str:
        """The same for both orders of sides, so that no rater gets a question twice."""
        sides = sorted(f"{side.method}{'x' if side.degraded else ''}" for side in (self.left, self.right))
        return f"{self.prompt}:{'-'.join(sides)}"


def comparisons(prompts: int, methods: int, against: int | None = None) -> list[Comparison]:
    if against is None:
        pairs = list(combinations(range(methods), 2))
    else:
        pairs = [(against, other) for other in range(methods) if other != against]
    return [Comparison(prompt, *pair) for prompt in range(prompts) for pair in pairs]


def check_count(share: float, tasks: int) -> int:
    """Attention checks for this many comparisons: a share of them, at least one unless the share is 0."""
    return max(1, round(share * tasks)) if share > 0 else 0


def spoilt_pool(checks: int, prompts: int, methods: int, rng: random.Random) -> list[tuple[int, int]]:
    """The clips (prompt, method) with a spoilt copy: as many as one rater gets."""
    everything = [(prompt, method) for prompt in range(prompts) for method in range(methods)]
    return sorted(rng.sample(everything, min((checks + 1) // 2, len(everything))))


def deal(
    wanted: Collection[Comparison],
    *,
    checks: int,
    methods: int,
    pool: Sequence[tuple[int, int]],
    rng: random.Random,
) -> list[Task]:
    """The tasks of one rater in their order. Each two methods swap sides in half of their comparisons. Attention checks are spread over the whole: the
    k-th falls at random into the k-th part."""
    chosen = sorted(wanted)
    rng.shuffle(chosen)
    tasks = _sided(chosen, rng)
    inserted = _checks(checks, sorted({one.prompt for one in wanted}), methods, pool, rng)
    for number, check in reversed(list(enumerate(inserted))):
        first, last = (len(chosen) * part // len(inserted) for part in (number, number + 1))
        tasks.insert(rng.randint(first, max(first, last - 1)), check)
    return tasks


def _sided(chosen: Sequence[Comparison], rng: random.Random) -> list[Task]:
    flips: dict[tuple[int, int], list[bool]] = {}
    for one in chosen:
        flips.setdefault((one.first, one.second), []).append(False)
    for pair, places in sorted(flips.items()):
        half = len(places) // 2 + (len(places) % 2 and rng.randrange(2))
        flips[pair] = [place < half for place in range(len(places))]
        rng.shuffle(flips[pair])
    tasks = []
    for one in chosen:
        sides = Shown(one.first), Shown(one.second)
        left, right = reversed(sides) if flips[one.first, one.second].pop() else sides
        tasks.append(Task(one.prompt, left, right))
    return tasks


def _checks(
    count: int, prompts: Sequence[int], methods: int, pool: Sequence[tuple[int, int]], rng: random.Random
) -> list[Task]:
    spoilt = rng.sample(list(pool), min((count + 1) // 2, len(pool)))
    clips = [(prompt, method) for prompt in prompts for method in range(methods)]
    same = rng.sample(clips, min(count - len(spoilt), len(clips)))
    tasks = [Task(prompt, Shown(method), Shown(method)) for prompt, method in same]
    for prompt, method in spoilt:
        sides = [Shown(method), Shown(method, degraded=True)]
        rng.shuffle(sides)
        tasks.append(Task(prompt, *sides))
    rng.shuffle(tasks)
    return tasks


def attentive(task: Task, answers: Collection[str]) -> bool:
    """True if the answers to an attention check are those of an attentive rater.

    A clip with itself is a tie in every question. A spoilt copy is never preferred, and the original one is at least once.
    """
    if task.kind == "same":
        return set(answers) == {"tie"}
    whole, spoilt = ("right", "left") if task.left.degraded else ("left", "right")
    return whole in answers and spoilt not in answers
