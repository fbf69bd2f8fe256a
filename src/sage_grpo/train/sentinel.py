"""Watches a run: rows and held-out scores in, findings out. Pure logic: what is done about a finding is train/watch.py's.

Every figure that it sees is the same on all ranks, so all decide alike without a word; its memory is part of a checkpoint, so a
continued run decides as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from sage_grpo.train.config import SentinelConfig
from sage_grpo.train.signs import LEAST_PAST, SIGNS, TINY, Past, Row, values

WATCHED = (
    "reward/total", "reward/group_std", "reward/failed", "ratio/mean", "ratio/largest_log", "ratio/first_update",
    "ratio/clip_fraction", "gradient/norm", "kl/total", "optimizer/kl", "weights/distance", "weights/moved", "video/spread",
)  # fmt: skip
"""What is remembered of a row."""
AT_ONCE = ("not_finite",)
"""What needs no second look."""
ONLY_TOLD = ("decoupled",)
"""What is a reason to look, but not to act."""
LOOKS_LEFT = 3.0
"""A statistic of held-out clips whose mean has left the clips of the start by this many of their standard deviations has drifted."""
Scores = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Finding:
    """Something is wrong with a run."""

    name: str
    iteration: int
    text: str
    """What was measured, what it means and what to do."""
    act: bool
    """Whether it has lasted so long that it is to be acted on."""
    new: bool = True
    """Whether it was not there before."""


@dataclass(frozen=True, kw_only=True)
class Witnesses:
    """What is known about held-out scores besides the total."""

    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Rewards that are only measured, with the weights of their parts: higher is better, and nothing is trained on them."""
    statistics: Sequence[str] = ()
    """Parts of such rewards with weight 0: neither good nor bad, but they should not leave the range of the start."""


@dataclass(frozen=True)
class Change:
    """A mean over clips before and after, pair by pair."""

    by: float
    stderr: float

    def surely(self, deviations: float) -> bool:
        """Whether it is an increase beyond chance."""
        return self.by > deviations * self.stderr and self.by > 0


class Sentinel:
    """The memory of a run's figures, and what follows from them."""

    def __init__(
        self, config: SentinelConfig, *, clips: int = 1, clip: float = math.inf, witnesses: Witnesses | None = None
    ) -> None:
        self.config, self.clips, self.clip = config, clips, clip
        self.witnesses = witnesses or Witnesses()
        self.start: list[Row] = []
        self.recent: list[Row] = []
        self.streaks: dict[str, int] = {}
        """Consecutive looks at which a sign was there."""
        self.held_out: dict[str, dict[str, list[float | None]]] = {}
        """By score: those of every clip at the `first` evaluation and at the `best`, and the total's `then` at that one."""
        self.falling = False
        """Whether a held-out score is below its best, by more than chance would often do."""
        self.good: int | None = None
        """Iteration of the checkpoint that a rollback goes to."""
        self.rollbacks = 0
        self.brake = 1.0
        """Factor on the learning rate that findings have led to."""

    @property
    def open(self) -> list[str]:
        """Findings that hold now."""
        return [name for name, looks in self.streaks.items() if looks >= self._first(name)]

    def observe(self, iteration: int, row: Row) -> list[Finding]:
        """Look at the row of an iteration; returns what is new, or is to be acted on."""
        if self.config.action == "off":
            return []
        texts = {name: sign(row, self._past(name)) for name, sign in SIGNS.items()}
        kept = {name: row[name] for name in WATCHED if name in row}
        if len(self.start) < self.config.window:
            self.start.append(kept)
        self.recent = [*self.recent, kept][-2 * self.config.window :]
        return self._count(iteration, texts)

    def _past(self, name: str) -> Past:
        """What a sign compares with: not with the rows in which it was there already, unless that lasts longer than the window."""
        window = self.config.window
        before = self.recent[: len(self.recent) - min(self.streaks.get(name, 0), window)][-window:]
        return Past(
            start=self.start,
            recent=before,
            newest=self.recent[-1] if self.recent else {},
            clips=self.clips,
            clip=self.clip,
            deviations=self.config.deviations,
        )

    def evaluated(self, iteration: int, scores: Scores) -> list[Finding]:
        """Look at the scores of every held-out clip, in an order that never changes."""
        if self.config.action == "off":
            return []
        total = list(scores["total"])
        series = {"total": total}
        series |= {title: weighted(scores, weights) for title, weights in self.witnesses.scores.items()}
        texts = {
            "held_out_fell": self._fell(total),
            "decoupled": "",
            "hacking": "",
            "video_drift": self._drifted(scores),
        }
        for title in self.witnesses.scores:
            texts["decoupled"] = texts["decoupled"] or self._decoupled(title, series[title], total)
            texts["hacking"] = texts["hacking"] or self._hacked(title, series[title], total)
        best = {title: self.held_out[title]["best"] for title in series if title in self.held_out}
        self.falling = any(
            change(series[title], known).surely(self.config.stderrs / 2) for title, known in best.items()
        )
        for title, now in series.items():
            self._remember(title, now, total)
        for name in self.witnesses.statistics:
            self.held_out.setdefault(name, {"first": list(scores[name])})
        return self._count(iteration, texts)

    @property
    def sound(self) -> bool:
        """Whether there is no sign of anything and no held-out score has begun to fall: weights that are worth going back to."""
        return not self.falling and not any(self.streaks.values())

    def _fell(self, now: list[float | None]) -> str:
        known = self.held_out.get("total")
        if known is None:
            return ""
        lost, gain = change(now, known["best"]), change(known["first"], known["best"])
        if not lost.surely(self.config.stderrs) or lost.by < self.config.lost * max(gain.by, 0.0):
            return ""
        return (
            f"The held-out total is {lost.by:.3g} +- {lost.stderr:.2g} below its best, which was {gain.by:.3g} above the start"
            f"{self._training()}. Lower optimizer.lr, set optimizer.target_kl, or stop at best/."
        )

    def _training(self) -> str:
        rewards = values(self.recent[-self.config.window :], "reward/total")
        half = len(rewards) // 2
        if half < LEAST_PAST - 2:
            return ""
        rise = fmean(rewards[half:]) - fmean(rewards[:half])
        return f"; the training reward {'rose' if rise > 0 else 'fell'} by {abs(rise):.2g} meanwhile"

    def _decoupled(self, title: str, now: list[float | None], total: list[float | None]) -> str:
        """A witness that no longer follows: the total rises clearly, and by what the run's own past says of the two it should rise too."""
        known, own = self.held_out.get(title), self.held_out.get("total")
        if known is None or own is None:
            return ""
        gain, paid = change(known["first"], known["best"]), change(own["first"], known["then"])
        rise, lost = change(known["then"], total), change(now, known["best"])
        if gain.by <= 0 or paid.by <= 0 or lost.by < 0 or not rise.surely(2 * self.config.stderrs):
            return ""
        rate = gain.by / paid.by
        expected = [
            None if a is None or b is None or c is None else c + rate * (b - a)
            for a, b, c in zip(known["then"], total, known["best"])
        ]
        if not change(now, expected).surely(self.config.stderrs):
            return ""
        return (
            f"The held-out total rose by {rise.by:.3g} +- {rise.stderr:.2g} since {title}, which nothing is trained on, was at its best, and "
            f"{title} did not follow: look at the clips. Where it falls next, the reward is being hacked."
        )

    def _hacked(self, title: str, now: list[float | None], total: list[float | None]) -> str:
        """A witness that falls while what is trained on goes on rising. Both together are rarer than either, so less has to be lost."""
        known = self.held_out.get(title)
        if known is None:
            return ""
        lost, gain = change(now, known["best"]), change(known["first"], known["best"])
        rise = change(known["then"], total)
        if not rise.surely(self.config.stderrs) or not lost.surely(self.config.stderrs / 2):
            return ""
        if lost.by < self.config.lost / 2 * max(gain.by, 0.0):
            return ""
        return (
            f"{title}, which nothing is trained on, is {lost.by:.3g} +- {lost.stderr:.2g} below its best while the held-out total rose by "
            f"{rise.by:.3g} +- {rise.stderr:.2g}: the reward is being hacked. Stop at the best checkpoint, or add a reward that sees what is lost."
        )

    def _drifted(self, scores: Scores) -> str:
        """A statistic that leaves the range of the first clips while the total rises."""
        known = self.held_out.get("total")
        if known is None or not change(known["first"], list(scores["total"])).surely(self.config.stderrs):
            return ""
        for name in self.witnesses.statistics:
            first, now = finite(self.held_out[name]["first"]), finite(scores[name])
            if len(first) < 2 or not now:
                continue
            width = max(stdev(first), TINY)
            if abs(fmean(now) - fmean(first)) > LOOKS_LEFT * width:
                return (
                    f"{name} of held-out clips went from {fmean(first):.3g} (+- {width:.2g} from clip to clip) to {fmean(now):.3g} while the "
                    "total rose: look at the clips; if they are worse, the reward is being hacked."
                )
        return ""

    def _remember(self, title: str, now: list[float | None], total: list[float | None]) -> None:
        known = self.held_out.setdefault(title, {"first": now, "best": now, "then": total})
        if change(known["best"], now).by > 0:
            known |= {"best": now, "then": total}

    def _count(self, iteration: int, texts: Mapping[str, str]) -> list[Finding]:
        """Lengthen or end the streaks of these signs; a finding is told when it begins, and again whenever it is to be acted on."""
        found = []
        for name, text in texts.items():
            looks = self.streaks[name] = self.streaks.get(name, 0) + 1 if text else 0
            over = looks - self._first(name) - self._confirm(name)
            act = name not in ONLY_TOLD and over >= 0 and over % max(1, self._again(name)) == 0
            new = looks == self._first(name)
            if new or act:
                found.append(Finding(name, iteration, text, act, new))
        return found

    def _first(self, name: str) -> int:
        return self.config.patience if name in SIGNS and name not in AT_ONCE else 1

    def _confirm(self, name: str) -> int:
        return 0 if name in AT_ONCE else self.config.patience if name in SIGNS else 1

    def _again(self, name: str) -> int:
        return self.config.window if name in SIGNS else 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that a continued run needs; JSON."""
        return {
            "start": [_plain(row) for row in self.start],
            "recent": [_plain(row) for row in self.recent],
            "streaks": dict(self.streaks),
            "held_out": {
                title: {key: list(column) for key, column in known.items()} for title, known in self.held_out.items()
            },
            "falling": self.falling,
            "good": self.good,
            "rollbacks": self.rollbacks,
            "brake": self.brake,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; a checkpoint from before there was a sentinel has none."""
        self.start, self.recent = list(state.get("start", [])), list(state.get("recent", []))
        self.streaks = dict(state.get("streaks", {}))
        self.held_out = {title: dict(known) for title, known in state.get("held_out", {}).items()}
        self.falling = bool(state.get("falling", False))
        self.good, self.rollbacks = state.get("good"), int(state.get("rollbacks", 0))
        self.brake = float(state.get("brake", 1.0))

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Remember what was known at a checkpoint, but not forget what was done since: else it would be done forever."""
        done = self.rollbacks, self.brake, self.good
        self.load_state_dict(state)
        self.rollbacks, self.brake, self.good = done
        self.streaks = {}


def weighted(scores: Scores, weights: Mapping[str, float]) -> list[float | None]:
    """The weighted sum of parts, clip by clip; None where one is missing."""
    columns = [scores[name] for name in weights]
    return [
        None
        if any(value is None for value in clip)
        else sum(weight * value for weight, value in zip(weights.values(), clip))  # type: ignore[operator]
        for clip in zip(*columns)
    ]


def finite(column: Sequence[float | None]) -> list[float]:
    """What was scored."""
    return [value for value in column if value is not None and math.isfinite(value)]


def change(before: Sequence[float | None], after: Sequence[float | None]) -> Change:
    """Mean paired difference with its standard error, over the clips that have both scores; no pairs are no change."""
    pairs = [b - a for a, b in zip(before, after) if a is not None and b is not None]
    if len(pairs) < 2:
        return Change(fmean(pairs) if pairs else 0.0, math.inf)
    return Change(fmean(pairs), stdev(pairs) / math.sqrt(len(pairs)))


def _plain(row: Row) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}
