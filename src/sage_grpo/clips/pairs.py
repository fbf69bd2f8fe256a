"""A tuned model against its base on the same prompts and noises, clip by clip.

Clips of one prompt are not independent, so a prompt counts once: its difference is the mean over its clips, and the interval is Student's t
over prompts. Wins are counted by clips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sage_grpo.documents import finite
from sage_grpo.inside import replace_text
from sage_grpo.statistics import paired_interval

if TYPE_CHECKING:
    from sage_grpo.training.evaluate import Evaluation


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What the tuned model changes in one score."""

    base: float
    """Mean over the clips that both models have a score for."""
    tuned: float
    """Its counterpart."""
    change: float
    """Mean over prompts of tuned minus base."""
    low: float
    """Ends of the 95% interval; NaN for a single prompt."""
    high: float
    p: float
    """Two-sided p of no change, for this score alone."""
    prompts: int
    """Prompts with a pair."""
    pairs: int
    """Clips that both models have a score for."""
    wins: int
    """Pairs in which the tuned clip scores higher."""
    ties: int
    """Pairs of equal scores."""
    left_out: int
    """Pairs in which a reward failed."""

    @property
    def win_share(self) -> float:
        """Share of the pairs that the tuned model wins; a tie is half a win."""
        return (self.wins + 0.5 * self.ties) / self.pairs if self.pairs else math.nan


def compare(base: Evaluation, tuned: Evaluation) -> dict[str, Difference]:
    """The differences in every score, the total first."""
    names = [[row["prompt"], row["noise"]] for row in base.rows]
    if names != [[row["prompt"], row["noise"]] for row in tuned.rows]:
        raise ValueError("The two evaluations have other prompts or noises: only clips of the same can be paired.")
    scores = list(base.rows[0]["scores"]) if base.rows else []
    return {name: _difference(name, base.rows, tuned.rows) for name in scores}


def _difference(name: str, base: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> Difference:
    pairs: list[tuple[str, float, float]] = []
    for one, other in zip(base, tuned, strict=True):
        before, after = one["scores"][name], other["scores"][name]
        if before is not None and after is not None:
            pairs.append((one["prompt"], before, after))
    prompts = list(dict.fromkeys(prompt for prompt, _, _ in pairs))
    means = [
        {place: fmean(pair[1:][side] for pair in pairs if pair[0] == prompt) for place, prompt in enumerate(prompts)}
        for side in (0, 1)
    ]
    found = paired_interval(means[1], means[0])
    return Difference(
        base=fmean(before for _, before, _ in pairs) if pairs else math.nan,
        tuned=fmean(after for _, _, after in pairs) if pairs else math.nan,
        change=found.mean,
        low=found.low,
        high=found.high,
        p=found.p,
        prompts=found.count,
        pairs=len(pairs),
        wins=sum(after > before for _, before, after in pairs),
        ties=sum(after == before for _, before, after in pairs),
        left_out=len(base) - len(pairs),
    )


def document(found: Mapping[str, Difference], base: Evaluation, tuned: Evaluation) -> dict[str, Any]:
    """For programs: what a plain evaluation of each model says, the differences, and every pair."""
    return {
        "base": _plain(base),
        "tuned": _plain(tuned),
        "differences": {name: finite({**asdict(one), "win_share": one.win_share}) for name, one in found.items()},
        "pairs": [
            {"prompt": one["prompt"], "noise": one["noise"], "base": one["scores"], "tuned": other["scores"]}
            for one, other in zip(base.rows, tuned.rows, strict=True)
        ],
    }


def write(folder: Path, written: Mapping[str, Any], base: Evaluation, tuned: Evaluation) -> None:
    """pairs.json, and a contact sheet with every base clip above its tuned one."""
    from sage_grpo.video import contact_sheet

    replace_text(folder / "pairs.json", dumps(written, indent=1) + "\n")
    if len(base.clips):
        clips = [clip for pair in zip(base.clips, tuned.clips) for clip in pair]
        captions = [f"{name}: {text}" for text in base.captions for name in ("base", "tuned")]
        contact_sheet(folder / "pairs.png", clips, captions)


def _plain(result: Evaluation) -> dict[str, Any]:
    return finite({name.removeprefix("eval/"): value for name, value in result.metrics.items()})
