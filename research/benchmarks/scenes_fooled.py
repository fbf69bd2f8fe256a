"""Clips that fool a learned reward of the scenes world: clean clips with one property exaggerated, scored by the reward and by the judge.

    PYTHONPATH=src python research/benchmarks/scenes_fooled.py REWARD --prompts 64 --out fooled.json

REWARD is a folder that `python -m research.pretraining.scenes reward` wrote. Annotators like color and change, and neither they nor the network look at every frame. Where
the learned total of a row is above that of clean clips while the true one is below, a policy that makes such clips is paid for making worse ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from research.pretraining.scenes.faults import FAULTS
from research.scenes.learned import LearnedReward
from research.scenes.world import SCENES
from sage_grpo.worlds.shapes.render import to_uint8

WEIGHTS = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
"""Of the parts in a total, the judge's and the learned reward's."""
EXAGGERATED = ("too_colourful", "too_fast", "flashing")
STRENGTHS = (0.1, 0.25, 0.5, 1.0)


def treated(clips: Tensor, seen: Sequence[int], strengths: Sequence[float] = STRENGTHS) -> Iterator[tuple[str, Tensor]]:
    """The clips as they are, with each bias exaggerated more and more, and with nothing in the frames that the network does not see."""
    yield "clean", clips
    floats = clips.float() / 255
    for name in EXAGGERATED:
        for strength in strengths:
            given = torch.full((len(clips),), strength)
            yield f"{name} {strength:g}", to_uint8(FAULTS[name](floats, given, torch.Generator().manual_seed(0)))
    hidden = clips.clone()
    hidden[:, [frame for frame in range(clips.shape[1]) if frame not in seen]] = 0
    yield "unseen frames black", hidden


def measured(reward: LearnedReward, prompts: Sequence[str], strengths: Sequence[float] = STRENGTHS) -> list[dict]:
    """A row for every treatment: means of the learned and of the true parts and totals, and how far both totals are from the clean clips'."""
    judge, fps = SCENES.judge(), SCENES.format[2]
    clips = SCENES.clips(prompts, seed=1)
    rows: list[dict] = []
    for name, videos in treated(clips, reward.frames_read(clips.shape[1], fps), strengths):
        learned, true = ({k: float(v.mean()) for k, v in one(videos, prompts, fps).items()} for one in (reward, judge))
        row = {"clips": name, "learned": sum(weight * learned[part] for part, weight in WEIGHTS.items())}
        row |= {"true": true["Overall"], "drift": true["drift"]}
        row |= {f"learned {part}": learned[part] for part in WEIGHTS} | {f"true {part}": true[part] for part in WEIGHTS}
        first = rows[0] if rows else row
        row["fooled"] = row["learned"] > first["learned"] and row["true"] < first["true"]
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reward", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="write the rows to this file")
    options = parser.parse_args(arguments)
    rows = measured(LearnedReward(checkpoint=str(options.reward)), SCENES.texts("heldout")[: options.prompts])
    print(f"{'clips':<22}{'learned':>9}{'true':>8}{'drift':>8}   learned VQ MQ TA        true VQ MQ TA")
    for row in rows:
        parts = ["".join(f"{row[f'{who} {part}']:>8.3f}" for part in ("VQ", "MQ", "TA")) for who in ("learned", "true")]
        mark = "  fooled" if row["fooled"] else ""
        print(
            f"{row['clips']:<22}{row['learned']:>9.3f}{row['true']:>8.3f}{row['drift']:>8.4f} {' '.join(parts)}{mark}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
