"""Watches a run: rows and held-out scores in, findings out. Pure logic: training/guard.py acts on findings.

Its inputs are the same on all ranks, so all decide alike without communication; its state is part of a checkpoint, so a
resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sage_grpo.health.checks import LEAST_PAST, SIGNS, MetricHistory, Row, values
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import (
    AGREEMENT,
    STDERR,
    Agreement,
    Column,
    PastEvaluation,
    RewardParts,
    Scores,
    agreement_of,
    by_prompt,
    change,
    evidence,
    finite,
    shortfall,
    weighted,
)
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.utils import json_schema

WATCHED = (
    "reward/total", "reward/group_std", "reward/failed", "ratio/mean", "ratio/largest_log", "ratio/first_log",
    "ratio/clip_fraction", "gradient/norm", "kl/total", "optimizer/kl", "weights/distance", "weights/moved", "video/spread",
)  # fmt: skip
"""Metrics of a row that are stored."""
EVALUATED = ("held_out_fell", "held_out_part_fell", "decoupled", "hacking", "witness_fell")
"""Findings at evaluations; the others are checked in every row."""
AT_ONCE = ("not_finite",)  # need not be confirmed by a second row
WARN_ONLY = ("decoupled", "rate_at_floor")
OF_STEPS = ("replay_differs", "ratio_off", "clipped_away", "weights_stuck", "rate_at_floor")
"""Findings about the optimizer steps; they do not put held-out scores in doubt. Any of these may last for a whole
run."""
SURE = 1.5
"""Factor on `stderrs` for the finding that a held-out reward fell. More than 1, because the best of many evaluations is
partly luck, and every evaluation is another chance to be wrong."""
WARNED = 1.25
"""The same for a held-out reward that no longer follows, which only warns: an early warning may be wrong more often (11
instead of 4 of 100 simulated runs)."""
MOST_REMEMBERED = 16
"""Evaluations that are stored; beyond that every other one is dropped."""
STATE = ("streaks", "held_out", "falling", "good", "rollbacks", "brake", "agreement", "at_best")
"""Attributes that a checkpoint stores unchanged."""


@dataclass(frozen=True)
class Finding:
    """A problem of a run."""

    name: str
    iteration: int
    text: str
    act: bool
    """True if it has lasted long enough for an action."""
    new: bool = True


class Sentinel:
    """Stores a run's metrics and derives findings.

    `witnesses` are rewards that are only measured, with the weights of their parts: higher is better, and nothing is
    trained on them. `trained` has the weights of the trained reward's parts.
    """

    def __init__(
        self,
        config: SentinelConfig,
        *,
        clips: int = 1,
        clip_range: float = math.inf,
        witnesses: Mapping[str, Mapping[str, float]] | None = None,
        trained: Mapping[str, float] | None = None,
    ) -> None:
        self.config, self.clips, self.clip_range = config, clips, clip_range
        self.witnesses = witnesses or {}
        self.parts = RewardParts(trained or {}, config.window)
        self.start: list[Row] = []
        self.recent: list[Row] = []
        self.streaks: dict[str, int] = {}  # consecutive rows, or evaluations, with a finding
        # By score: every clip at the `first` evaluation and at the `best`, and the total at that time (`then`).
        self.held_out: dict[str, dict[str, Column]] = {}
        self.falling = False  # a held-out score is below its best, by more than chance would often do
        self.good: int | None = None  # iteration of the checkpoint for rollbacks
        self.rollbacks, self.brake = 0, 1.0  # brake: the factor on the learning rate because of findings
        # Agreement of every held-out reward with the total, within groups: in all iterations, and until its best.
        self.agreement: dict[str, Agreement] = {}
        self.at_best: dict[str, Agreement] = {}
        self.remembered: list[PastEvaluation] = []  # evaluations so far, always with the first

    @classmethod
    def of(cls, config: SentinelConfig, reward: CompositeReward, *, clips: int, clip_range: float) -> Sentinel:
        scores = {title: {part: w for part, w in weights.items() if w} for title, weights in reward.watching.items()}
        witnesses = {title: weights for title, weights in scores.items() if weights}
        return cls(config, clips=clips, clip_range=clip_range, witnesses=witnesses, trained=reward.weights)

    @property
    def open(self) -> list[str]:
        """Findings that hold now."""
        return [name for name, streak in self.streaks.items() if streak >= self._timing(name)[0]]

    @property
    def sound(self) -> bool:
        """True if there is no finding and no held-out score has begun to fall: the weights are worth a rollback."""
        return not self.falling and not any(self.streaks.values())

    @property
    def doubts(self) -> list[str]:
        """Findings, lasting or not, that put scores in doubt: such weights do not become the best."""
        return [name for name, streak in self.streaks.items() if streak and name not in OF_STEPS]

    def observe(self, iteration: int, row: Row) -> list[Finding]:
        """Add the row of an iteration; returns findings that are new or need an action."""
        if self.config.action == "off":
            return []
        texts = {name: sign(row, self._past(name)) for name, sign in SIGNS.items()}
        agreements = [prefix + title for title in self.witnesses for prefix in (AGREEMENT, STDERR)]
        kept = {name: row[name] for name in (*WATCHED, *agreements, *self.parts.of(row)) if name in row}
        if len(self.start) < self.config.window:
            self.start.append(kept)
        self.recent = [*self.recent, kept][-2 * self.config.window :]
        for title in self.witnesses:
            self.agreement[title] = self.agreement.get(title, Agreement()).plus(agreement_of(kept, title))
        fallen = self.parts.observe(self.recent)
        texts["part_lost"] = fallen and (
            f"Over the last {self.config.window} iterations {fallen}{self._training()}. A loss that all clips of a group share has no gradient and "
            "may not recover by itself. Look at the clips; lower optimizer.lr or explore fewer steps, and continue from an earlier checkpoint."
        )
        return self._count(iteration, texts)

    def _past(self, name: str) -> MetricHistory:
        """The past for a check: without the rows that have its finding already, unless it outlasts the window."""
        window, streak = self.config.window, self.streaks.get(name, 0)
        begun = self.parts.rows - streak  # rows before the finding
        return MetricHistory(
            start=self.start[:begun] if begun > 0 else self.start,
            recent=self.recent[: len(self.recent) - min(streak, window)][-window:],
            clips=self.clips,
            clip_range=self.clip_range,
            deviations=self.config.deviations,
            brake=self.brake,
        )

    def evaluated(self, iteration: int, scores: Scores, per_prompt: int = 1) -> list[Finding]:
        """Add the scores of every held-out clip, always in the same order, with `per_prompt` adjacent clips of each
        prompt."""
        if self.config.action == "off":
            return []
        series = {"total": list(scores["total"])}
        series |= {title: weighted(scores, weights) for title, weights in self.witnesses.items()}
        series = {title: by_prompt(column, per_prompt) for title, column in series.items()}
        total = series["total"]
        fallen = self.parts.evaluated(scores, per_prompt)
        texts = {
            "held_out_fell": self._fell(total),
            "held_out_part_fell": fallen
            and (
                f"On held-out prompts {fallen}; the total may look harmless{self._training()}. A loss that all clips of a group share has no gradient "
                "and may not recover by itself. Look at the clips; lower optimizer.lr, or set sentinel.action to rollback."
            ),
            **dict.fromkeys(("decoupled", "hacking", "witness_fell"), ""),
        }
        for title in self.witnesses:
            texts["decoupled"] = texts["decoupled"] or self._decoupled(title, series[title], total)
            name, text = self._witness_lost(title, series[title], total)
            if name:
                texts[name] = texts[name] or text
        best = {title: self.held_out[title]["best"] for title in series if title in self.held_out}
        self.falling = self.parts.falling or any(
            change(series[title], known).surely(self.config.stderrs / 2) for title, known in best.items()
        )
        for title, now in series.items():
            known = self.held_out.setdefault(title, {"first": now, "best": now, "then": total})
            if change(known["best"], now).by > 0:
                known |= {"best": now, "then": total}
                self.at_best[title] = self.agreement.get(title, Agreement())
        # If every reward failed there are no scores to compare with.
        if self.witnesses and finite(total):
            self.remembered.append(PastEvaluation(series, dict(self.agreement)))
            if len(self.remembered) > MOST_REMEMBERED:
                self.remembered = self.remembered[::2]
        return self._count(iteration, texts)

    def _fell(self, now: Column) -> str:
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

    def _decoupled(self, title: str, now: Column, total: Column) -> str:
        """A held-out reward no longer follows: the first half of the total's rise raised it, the second half does not.

        Two independent sources are combined: held-out clips, and the members of training's groups.
        """
        if len(self.remembered) < 2 or not finite(total):
            return ""
        first = self.remembered[0]
        middle = fmean(finite(total) + finite(first.scores["total"]))
        half = min(self.remembered[1:], key=lambda one: abs(fmean(finite(one.scores["total"])) - middle))
        totals, own = [[first.scores[name], half.scores[name], last] for name, last in (("total", total), (title, now))]
        gain, later = change(own[0], own[1]), change(own[1], own[2])
        rise, short = change(totals[1], totals[2]), shortfall(totals, own)
        sure = self.config.stderrs
        if not rise.surely(2 * sure) or not gain.surely(sure / 2) or later.surely(sure / 2):
            return ""
        before = half.agreement.get(title, Agreement())
        since = self.agreement.get(title, before).plus(before, -1)
        drop = before.to(since)
        if evidence(short, drop) <= WARNED * sure or not (drop is None or drop.surely(sure / 2)):
            return ""
        groups = drop and (
            f" (agreement within groups {before.mean:.2f} +- {before.stderr:.2g} before, {since.mean:.2f} +- {since.stderr:.2g} since)"
        )
        return (
            f"{title}, which nothing is trained on, rose by {gain.by:.3g} +- {gain.stderr:.2g} with the first half of the held-out total's rise, "
            f"and by {later.by:.3g} +- {later.stderr:.2g} with the second{groups or ''}: it no longer follows. Look at "
            "the clips: it is at its ceiling, or the reward begins to be hacked."
        )

    def _witness_lost(self, title: str, now: Column, total: Column) -> tuple[str, str]:
        """A held-out reward fell: the finding's name and text. While the trained total rises, diverging preferences
        within groups add to the evidence; otherwise held-out clips alone must be surer, because no rise explains it."""
        known = self.held_out.get(title)
        if known is None:
            return "", ""
        lost, gain = change(now, known["best"]), change(known["first"], known["best"])
        rise, sure = change(known["then"], total), self.config.stderrs
        share = lost.by / gain.by if gain.by > 0 else math.inf
        text = f"{title}, which nothing is trained on, is {lost.by:.3g} +- {lost.stderr:.2g} below its best"
        remedy = "Stop at the best checkpoint, or add a reward that measures the loss."
        if rise.surely(sure):
            before = self.at_best.get(title, Agreement())
            since = self.agreement.get(title, before).plus(before, -1)
            certain = lost.surely(sure / 2) and evidence(lost, before.to(since)) > SURE * sure
            text += f" while the held-out total rose by {rise.by:.3g} +- {rise.stderr:.2g}: the reward is being hacked. {remedy}"
            return ("hacking", text) if certain and share >= self.config.lost / 2 else ("", "")
        text += ", and the held-out total has not risen since: training costs something that the total does not measure, and gains nothing. "
        certain = lost.surely(SURE * sure)
        return ("witness_fell", text + remedy) if certain and share >= self.config.lost else ("", "")

    def _count(self, iteration: int, texts: Mapping[str, str]) -> list[Finding]:
        """Update the streaks; a finding is reported when it begins, and again whenever an action is due."""
        found = []
        for name, text in texts.items():
            streak = self.streaks[name] = self.streaks.get(name, 0) + 1 if text else 0
            warned, confirmed, again = self._timing(name)
            over = streak - warned - confirmed
            act = name not in WARN_ONLY and over >= 0 and over % again == 0
            new = streak == warned
            if new or act:
                found.append(Finding(name, iteration, text, act, new))
        return found

    def _timing(self, name: str) -> tuple[int, int, int]:
        """Consecutive rows until a finding is reported, further ones until an action, and between repeated actions."""
        patience, window = self.config.patience, self.config.window
        return (1, 0, window) if name in AT_ONCE else (1, 1, 1) if name in EVALUATED else (patience, patience, window)

    def state_dict(self) -> dict[str, Any]:
        state = {
            **{name: getattr(self, name) for name in STATE},
            "start": json_schema.finite(self.start),
            "recent": json_schema.finite(self.recent),
            "parts": self.parts.state_dict(),
            "looks": [asdict(one) for one in self.remembered],
        }
        known: dict[str, Any] = json.loads(json.dumps(state))  # a copy: the run continues while it is written
        return known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = deepcopy(dict(state))
        for name in ("start", "recent", *STATE):
            setattr(self, name, state[name])
        checks = {*SIGNS, *EVALUATED, "part_lost"}  # runs of earlier versions had others, which would never end
        self.streaks = {name: streak for name, streak in self.streaks.items() if name in checks}
        self.agreement, self.at_best = _agreements(self.agreement), _agreements(self.at_best)
        self.remembered = [PastEvaluation(one["scores"], _agreements(one["agreement"])) for one in state["looks"]]
        self.parts.load_state_dict(state["parts"])

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, but keep the record of rollbacks: otherwise they would repeat forever."""
        done = self.rollbacks, self.brake, self.good
        self.load_state_dict(state)
        self.rollbacks, self.brake, self.good = done
        self.streaks = {}


def _agreements(state: Mapping[str, Sequence[Any]]) -> dict[str, Agreement]:
    return {title: Agreement(*known) for title, known in state.items()}
