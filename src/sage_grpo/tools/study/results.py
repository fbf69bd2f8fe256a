"""From votes to tables: win rates with intervals, agreement, ranking, each rater's record, and the CSV to verify them with."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

from sage_grpo.tools.study.pairs import attentive, comparisons
from sage_grpo.tools.study.store import Store, Study, Vote
from sage_grpo.utils.statistics import Z95
from sage_grpo.utils.text import fixed, percent, spreadsheet_cell

COLUMNS = (
    "rater", "flagged", "place", "kind", "prompt_number", "prompt", "left", "right", "dimension", "answer", "preferred",
    "shown_at", "voted_at", "seconds",
)  # fmt: skip


def raters(store: Store, votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """The record of each rater: progress, attention checks, speed, and the share of votes for the left side."""
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
    """The method that a vote prefers; None is a tie."""
    answer = vote.answers[dimension]
    return {"left": vote.task.left.method, "right": vote.task.right.method, "tie": None}[answer]


def _dimension(study: Study, votes: Sequence[Vote], name: str) -> dict[str, Any]:
    """Win rates of every two methods, agreement and ranking in one dimension."""
    size = len(study.methods)
    wins = np.zeros((len(study.prompts), size, size))
    ties = np.zeros_like(wins)
    units: dict[str, list[int | None]] = defaultdict(list)
    for vote in votes:
        prompt, left, right = vote.task.prompt, vote.task.left.method, vote.task.right.method
        winner = preferred(vote, name)
        units[vote.task.identity].append(winner)
        if winner is None:
            ties[prompt, [left, right], [right, left]] += 1
        else:
            wins[prompt, winner, left + right - winner] += 1
    judged = sorted({vote.task.prompt for vote in votes})
    won, tied, methods = wins.sum(0).astype(int), ties.sum(0).astype(int), study.methods
    ranking = [
        {"method": method, "strength": float(strength), "low": float(low), "high": float(high)}
        for method, (strength, low, high) in zip(methods, ranked((wins + ties / 2)[judged], seed=study.seed))
    ]
    return {
        "pairs": [
            {"first": methods[i], "second": methods[j], **win_rate(int(won[i, j]), int(tied[i, j]), int(won[j, i]))}
            for _, i, j in comparisons(1, size, study.against)
        ],
        "agreement": krippendorff_alpha(units.values()),
        "judged_twice": sum(len(unit) > 1 for unit in units.values()),
        "ranking": sorted(ranking, key=lambda row: -float(row["strength"])),
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
        places = []
        for row in part["ranking"]:
            strength, low, high = (fixed(row[name], 2, signed=True) for name in ("strength", "low", "high"))
            places.append(f"{row['method']} {strength} [{low}, {high}]")
        lines += [f"  Bradley-Terry log-strength: {', '.join(places) or '-'}"]
    lines += [
        "",
        "Win rate: wins over decided votes, 95% Wilson interval; ties are left out of it. Ranking: a tie is half a win for each.",
    ]
    return "\n".join(lines)


def _table(pairs: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [("", "win rate", "95% interval", "wins", "ties", "losses")]
    for pair in pairs:
        interval = "-" if pair["rate"] is None else f"{percent(pair['low'], 1)} to {percent(pair['high'], 1)}"
        rate = "-" if pair["rate"] is None else percent(pair["rate"], 1)
        wins, ties, losses = (str(pair[name]) for name in ("wins", "ties", "losses"))
        rows.append((f"{pair['first']} vs {pair['second']}", rate, interval, wins, ties, losses))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  " + f"{row[0]:<{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))
        for row in rows
    ]


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


def bradley_terry(wins: np.ndarray, *, prior: float = 0.0, tolerance: float = 1e-10, most: int = 100_000) -> np.ndarray:
    """Log-strengths with mean 0 from wins[..., i, j], how often i was preferred to j; a tie is half a win for each.

    P(i is preferred to j) = s_i / (s_i + s_j). Hunter's (2004) minorisation: s_i <- W_i / sum_j n_ij / (s_i + s_j). `prior` adds
    that many ties to every two methods that were compared, so that one that won everything has a finite strength: without it
    that is an error. Leading dimensions are problems of their own.
    """
    wins = np.asarray(wins, dtype=float)
    compared = (wins + np.swapaxes(wins, -1, -2)) > 0
    wins = wins + prior / 2 * compared
    games = wins + np.swapaxes(wins, -1, -2)
    won, played = wins.sum(-1), games.sum(-1) > 0
    if np.any(played & (won == 0)):
        raise ValueError("A method that was never preferred has no finite strength: give a prior.")
    logs = np.zeros(won.shape)
    for _ in range(most):
        strengths = np.exp(logs)
        sums = strengths[..., :, None] + strengths[..., None, :]
        updated = np.log(np.where(played, won, 1.0)) - np.log(np.where(played, (games / sums).sum(-1), 1.0))
        updated -= updated.mean(-1, keepdims=True)
        done = np.abs(updated - logs).max(initial=0.0) < tolerance
        logs = updated
        if done:
            return logs
    raise ValueError("The strengths do not settle: some methods were always preferred to others; give a prior.")


def ranked(groups: np.ndarray, *, draws: int = 1000, seed: int = 0) -> np.ndarray:
    """Rows of (log-strength, low, high), one a method, from wins[group, i, j]; a group is a prompt.

    The 95% interval comes from drawing whole groups with replacement: votes on one prompt are alike. One tie is added to
    every two methods (see `bradley_terry`).
    """
    count = len(groups)
    if not count:
        return np.empty((0, 3))
    strengths = bradley_terry(groups.sum(0), prior=1.0)
    times = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=draws)
    drawn = bradley_terry(np.tensordot(times, groups, axes=1), prior=1.0, tolerance=1e-6)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return np.stack([strengths, low, high], axis=-1)
