"""Does the reward itself ask the miniature to give up rare shapes? Clips of the base model, 12 from each of 14 training prompts of every shape.

    python research/benchmarks/shape_balance.py --out research/benchmarks/results/shape_balance_cpu.json      # about 3 minutes of one core

For every shape that prompts name: the share of clips that show it, the total of those that do and of those that do not, and, within the clips of
a prompt, how much the total and the rest of it (without the shape's own share) rise with the shape's score.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from torch import Tensor

from sage_grpo import generate
from sage_grpo.worlds.shapes.judge import WEIGHTS, ShapesJudge
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, FPS, from_text, scenes_of, to_text

PROMPTS, CLIPS, STEPS = 14, 12, 6
"""Prompts of a shape, clips of a prompt, and steps of the ODE, as many as rollouts have."""


def texts() -> list[str]:
    """The prompts, shape after shape."""
    scenes = scenes_of("train")
    random.Random(0).shuffle(scenes)
    chosen = [[scene for scene in scenes if scene.shape == shape][:PROMPTS] for shape in ATTRIBUTES["shape"]]
    return [to_text(scene, place) for shape in chosen for place, scene in enumerate(shape)]


def measure(prompts: list[str], scores: dict[str, Tensor], seen: Tensor) -> dict[str, dict[str, float]]:
    """By shape; `seen` is the shape that each clip shows, as an index."""
    total = scores["TA"] + 0.5 * scores["MQ"] + 0.5 * scores["VQ"]
    shown, rest = scores["TA/shape"], total - WEIGHTS["shape"] * scores["TA/shape"]
    found = {}
    for index, shape in enumerate(ATTRIBUTES["shape"]):
        own = [place for place, prompt in enumerate(prompts) if from_text(prompt).shape == shape]
        right = seen[own] == index
        within = [values[own].unflatten(0, (-1, CLIPS)) for values in (shown, total, rest)]
        level, rises, others = (group - group.mean(1, keepdim=True) for group in within)
        found[shape] = {
            "clips": len(own),
            "share_shown": float(right.float().mean()),
            "total_where_shown": float(total[own][right].mean()),
            "total_elsewhere": float(total[own][~right].mean()),
            "total_per_unit": float((level * rises).sum() / level.square().sum()),
            "rest_per_unit": float((level * others).sum() / level.square().sum()),
        }
    return {shape: {name: round(value, 3) for name, value in row.items()} for shape, row in found.items()}


def main() -> None:
    """Generate, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    clips = generate(texts(), per_prompt=CLIPS, batch=4 * CLIPS, steps=STEPS)
    judge = ShapesJudge()
    seen = judge.examine(clips.videos).beliefs["shape"].argmax(1)
    found = measure(clips.prompts, dict(judge(clips.videos, clips.prompts, FPS)), seen)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
