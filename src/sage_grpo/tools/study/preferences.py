"""From votes to training pairs: for every comparison the clip that most answers prefer, and the other."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.tools.study.results import preferred, raters
from sage_grpo.tools.study.store import Store, StudyError
from sage_grpo.utils.suggest import did_you_mean


@dataclass(frozen=True)
class Preferences:
    """A study's votes as pairs of clips."""

    rows: list[dict[str, Any]]
    """prompt, win and lose (files in the study's clips), and the numbers of answers for and against."""
    votes: int
    """Counted votes."""
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
