"""From votes to tables (win rates with intervals, agreement, each rater's record), to the CSV to verify them with, and to pairs for training."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from sage_grpo.tools.study.pairs import attentive, comparisons
from sage_grpo.tools.study.store import Store, Study, StudyError, Vote
from sage_grpo.utils.statistics import Z95
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.utils.text import fixed, markdown, percent, spreadsheet_cell

COLUMNS = (
    "rater", "flagged", "place", "kind", "prompt_number", "prompt", "left", "right", "dimension", "answer", "preferred",
    "shown_at", "voted_at", "seconds",
)  # fmt: skip


def raters(store: Store, votes: Sequence[Vote]) -> list[dict[str, Any]]:
    own: dict[int, list[Vote]] = defaultdict(list)
    for vote in votes:
        own[vote.rater].append(vote)
    found = []
    for rater, (done, total) in store.progress().items():
        given = own[rater]
        checks = [attentive(vote.task, list(vote.answers.values())) for vote in given if vote.task.kind != "pair"]
        sides = [answer for vote in given if vote.task.kind == "pair" for answer in vote.answers.values()]
        decided = [side for side in sides if side != "tie"]
        failed = checks.count(False)
        found.append(
            {
                "rater": rater,
                "done": done,
                "total": total,
                "checks": len(checks),
                "failed": failed,
                "flagged": bool(checks) and failed / len(checks) > store.study.max_failed,
                "seconds": median(vote.voted - vote.shown for vote in given) if given else None,
                "ties": sides.count("tie") / len(sides) if sides else None,
                "left": decided.count("left") / len(decided) if decided else None,
            }
        )
    return found


def results(store: Store, *, exclude_flagged: bool = False) -> dict[str, Any]:
    """The content of the results page, as plain data. Attention checks are never part of it."""
    study, everything = store.study, store.votes()
    people = raters(store, everything)
    flagged = {one["rater"] for one in people if one["flagged"]}
    left_out = flagged if exclude_flagged else set()
    votes = [vote for vote in everything if vote.task.kind == "pair" and vote.rater not in left_out]
    return {
        "title": study.title,
        "methods": list(study.methods),
        "against": None if study.against is None else study.methods[study.against],
        "prompts": len(study.prompts),
        "excluded": sorted(left_out),
        "flagged": sorted(flagged),
        "votes": len(votes),
        "voters": len({vote.rater for vote in votes}),
        "max_failed": study.max_failed,
        "raters": people,
        "dimensions": [
            {"name": name, "question": question, **_dimension(study, votes, name)}
            for name, question in study.dimensions.items()
        ],
    }


def preferred(vote: Vote, dimension: str) -> int | None:
    answer = vote.answers[dimension]
    return {"left": vote.task.left.method, "right": vote.task.right.method, "tie": None}[answer]


def _dimension(study: Study, votes: Sequence[Vote], name: str) -> dict[str, Any]:
    counts = Counter[tuple[int, int, int | None]]()  # by first method, second method and winner
    units: dict[str, list[int | None]] = defaultdict(list)
    for vote in votes:
        winner = preferred(vote, name)
        first, second = sorted((vote.task.left.method, vote.task.right.method))
        counts[first, second, winner] += 1
        units[vote.task.identity].append(winner)
    pairs = []
    for _, i, j in comparisons(1, len(study.methods), study.against):
        won, tied, lost = (counts[min(i, j), max(i, j), winner] for winner in (i, None, j))
        pairs.append({"first": study.methods[i], "second": study.methods[j], **win_rate(won, tied, lost)})
    return {
        "pairs": pairs,
        "agreement": krippendorff_alpha(units.values()),
        "judged_twice": sum(len(unit) > 1 for unit in units.values()),
    }


def to_csv(store: Store) -> str:
    """One row per vote and dimension, attention checks included: `kind` distinguishes them. A text that a spreadsheet would compute is escaped."""
    votes, study = store.votes(), store.study
    flagged = {one["rater"] for one in raters(store, votes) if one["flagged"]}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for vote in votes:
        names = [
            spreadsheet_cell(study.methods[side.method]) + (" (spoilt)" if side.degraded else "")
            for side in (vote.task.left, vote.task.right)
        ]
        for dimension in study.dimensions:
            answer = vote.answers[dimension]
            choice = {"left": names[0], "right": names[1], "tie": "tie"}[answer]
            writer.writerow(
                [
                    vote.rater, int(vote.rater in flagged), vote.place + 1, vote.task.kind, vote.task.prompt + 1,
                    spreadsheet_cell(study.prompts[vote.task.prompt]), *names, spreadsheet_cell(dimension), answer, choice, _time(vote.shown),
                    _time(vote.voted), f"{vote.voted - vote.shown:.3f}",
                ]
            )  # fmt: skip
    return text.getvalue()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def to_text(found: Mapping[str, Any]) -> str:
    lines = [f"{found['title']}: {found['votes']} votes of {found['voters']} raters on {found['prompts']} prompts"]
    if found["flagged"]:
        what = "left out" if found["excluded"] else "counted; --exclude_flagged leaves them out"
        lines.append(f"flagged by attention checks: {', '.join(f'rater {one}' for one in found['flagged'])} ({what})")
    for part in found["dimensions"]:
        lines += ["", part["name"], *_table(part["pairs"])]
        alpha = "-" if part["agreement"] is None else fixed(part["agreement"], 2)
        lines += [f"  agreement (Krippendorff's alpha): {alpha}"]
    lines += [
        "",
        "Win rate: wins over decided votes, 95% Wilson interval; ties are left out of it.",
    ]
    return "\n".join(lines)


def _table(pairs: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = []
    for pair in pairs:
        interval = "-" if pair["rate"] is None else f"{percent(pair['low'], 1)} to {percent(pair['high'], 1)}"
        rate = "-" if pair["rate"] is None else percent(pair["rate"], 1)
        rows.append(
            (f"{pair['first']} vs {pair['second']}", rate, interval, pair["wins"], pair["ties"], pair["losses"])
        )
    return markdown(["", "win rate", "95% interval", "wins", "ties", "losses"], rows)


def win_rate(wins: int, ties: int, losses: int) -> dict[str, float | None]:
    """Wins over decided votes with Wilson's 95% interval; ties are left out of it. None without a decided vote."""
    decided = wins + losses
    rate = wins / decided if decided else None
    low, high = wilson(wins, decided) if decided else (None, None)
    return {"wins": wins, "ties": ties, "losses": losses, "rate": rate, "low": low, "high": high}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The score interval of a binomial share (Wilson, 1927): valid for few trials and for shares near 0 and 1."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"There cannot be {successes} successes in {trials} trials.")
    share, square = successes / trials, Z95 * Z95
    centre = share + square / (2 * trials)
    half = Z95 * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    whole = 1 + square / trials
    # At the ends the two terms are equal, but not to the last bit.
    low = 0.0 if successes == 0 else (centre - half) / whole
    high = 1.0 if successes == trials else (centre + half) / whole
    return low, high


def krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha for names without an order: 1 is full agreement, 0 is chance.

    A unit holds the answers of all its raters; units with fewer than two answers are ignored. Any number of
    raters, also a different one for each unit. None if nothing was judged twice, or if all answers are the same: then
    there is no chance to compare with.
    """
    counts = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[Hashable] = Counter()
    for unit in counts:
        totals.update(unit)
    everything = sum(totals.values())
    expected = everything**2 - sum(count**2 for count in totals.values())
    if expected == 0:
        return None
    observed = 0.0
    for unit in counts:
        size = sum(unit.values())
        observed += (size**2 - sum(count**2 for count in unit.values())) / (size - 1)
    return 1 - (everything - 1) * observed / expected


@dataclass(frozen=True)
class Preferences:
    """A study's votes as pairs of clips."""

    rows: list[dict[str, Any]]
    """prompt, win and lose (files in the study's clips), and the numbers of answers for and against."""
    votes: int
    undecided: int
    """Comparisons left out because equally many answers prefer either clip; ties count for neither."""

    def to_jsonl(self, clips: Path, folder: Path) -> str:
        """A list for data.clips in this folder; its paths lead from there to the clips."""
        way = Path(os.path.relpath(clips, folder))
        rows = [{**row, "win": str(way / row["win"]), "lose": str(way / row["lose"])} for row in self.rows]
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def preferences(store: Store, *, dimension: str | None = None, exclude_flagged: bool = False) -> Preferences:
    """Several votes on one pair are counted together, over all questions or in one; attention checks never count."""
    study, everything = store.study, store.votes()
    if dimension is not None and dimension not in study.dimensions:
        raise StudyError(
            f"The study has no question {dimension!r}, only {', '.join(study.dimensions)}.{did_you_mean(dimension, study.dimensions)}"
        )
    asked = study.dimensions if dimension is None else [dimension]
    flagged = {one["rater"] for one in raters(store, everything) if one["flagged"]} if exclude_flagged else set()
    votes = [vote for vote in everything if vote.task.kind == "pair" and vote.rater not in flagged]
    answers: dict[tuple[int, int, int], Counter[int]] = {}
    for vote in votes:
        first, second = sorted((vote.task.left.method, vote.task.right.method))
        found = answers.setdefault((vote.task.prompt, first, second), Counter())
        found.update(winner for name in asked if (winner := preferred(vote, name)) is not None)
    rows = []
    for (prompt, first, second), found in sorted(answers.items()):
        if found[first] != found[second]:
            win, lose = (first, second) if found[first] > found[second] else (second, first)
            rows.append(
                {
                    "prompt": study.prompts[prompt],
                    "win": store.clip_of(prompt, win),
                    "lose": store.clip_of(prompt, lose),
                    "votes_for": found[win],
                    "votes_against": found[lose],
                }
            )
    return Preferences(rows, len(votes), len(answers) - len(rows))
