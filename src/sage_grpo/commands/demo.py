"""Train the miniature video model on this machine, evaluate it on held-out prompts and draw what changed."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_grpo.printing import fixed
from sage_grpo.ranges import Count, Folder, Seed, checked


@checked
class Options:
    """The demo."""

    out: Folder = "runs/demo"
    """Folder of the run."""
    recipe: str = "shapes/sage"
    """Which recipe to run; try shapes/flow_grpo or shapes/cps to compare."""
    seed: Seed = 0
    """Seed of the run."""
    iterations: Count | None = None
    """Iterations; None is the recipe's, and 33 for shapes/branch, which then has learned as much as shapes/sage in 45."""


ENOUGH = {"shapes/branch": 33}
"""Iterations after which a method has the gain of shapes/sage (8 seeds, benchmarks/results/methods_h200.jsonl: 1.445 after 30,
1.470 after 45; sage 1.449 after 45)."""


def run(options: Options) -> int:
    """Train, draw, and say what to try next."""
    from sage_grpo import session
    from sage_grpo.folder.journal import read_rows
    from sage_grpo.recipes import recipe
    from sage_grpo.report.page import leave_report
    from sage_grpo.report.picture import draw_run

    start, out = time.perf_counter(), Path(options.out)
    config = replace(recipe(options.recipe), out=options.out, seed=options.seed)
    iterations = options.iterations or ENOUGH.get(options.recipe)
    if iterations is not None:
        config = replace(config, iterations=iterations)
    with session.session(config, remark=lambda text: print(f"sage-grpo: {text}", file=sys.stderr)) as world:
        session.run(config, world)
    told = leave_report(out)
    rows = [row for row in read_rows(out / "metrics.jsonl") if "eval/total" in row]
    if len(rows) < 2 or rows[-1]["iteration"] < config.iterations:
        return 0
    picture = draw_run(out, out / "picture.png")
    print(summary(rows[0], rows[-1]))
    print(f"\n{told}\nPicture: {picture}    ({time.perf_counter() - start:.0f} s)")
    print(NEXT.format(out=out))
    return 0


def summary(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A small table: held-out scores before and after."""
    names = [name for name in ("total", "TA", "MQ", "VQ", "drift") if f"eval/{name}" in before]
    lines = [f"\nheld-out prompts   {'before':>8} {'after':>8} {'change':>8}"]
    for name in names:
        old, new = before[f"eval/{name}"], after[f"eval/{name}"]
        lines.append(f"{name:<18} {fixed(old, 3):>8} {fixed(new, 3):>8} {fixed(new - old, 3, signed=True):>8}")
    return "\n".join(lines)


NEXT = """
Next (in the environment: source .venv/bin/activate):
  sage-grpo generate --run {out} --prompts "a large red circle moves right quickly on a white background"
  sage-grpo demo --recipe shapes/branch --out runs/branch      one exploring step, one replay per group: learns as much in about half the time
  sage-grpo demo --recipe shapes/flow_grpo --out runs/flow     another method on the same axes
  sage-grpo inspect --steps 20 --shift 5                       what the samplers do, as a table and a figure
  sage-grpo train --recipe hunyuan15_lora --print_config       the same job on HunyuanVideo-1.5 with VideoAlign
  tensorboard --logdir {out}/tensorboard"""
