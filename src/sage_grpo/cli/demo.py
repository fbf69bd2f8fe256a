"""Train the miniature video model on this machine and show how its held-out scores change."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sage_grpo.cli import say
from sage_grpo.config.ranges import Count, Folder, Seed, checked
from sage_grpo.utils.text import fixed

if TYPE_CHECKING:
    from sage_grpo.tools.report.run_data import RunData


@checked
class Options:
    """Options of the demo."""

    out: Folder = "runs/demo"
    """Folder of the run."""
    recipe: str = "shapes/sage"
    """Recipe to run: shapes/sage, shapes/branch, shapes/flow_grpo, ..."""
    seed: Seed = 0
    """Seed of the run."""
    iterations: Count = 30
    """Iterations; 30 reach about 95% of the gain of 45."""


def run(options: Options) -> int:
    from sage_grpo.recipes import recipe
    from sage_grpo.run import session
    from sage_grpo.tools.report.page import leave_report
    from sage_grpo.tools.report.run_data import read_run
    from sage_grpo.training.inputs import training_prompts

    start, out = time.perf_counter(), Path(options.out)
    config = replace(recipe(options.recipe), out=options.out, seed=options.seed, iterations=options.iterations)
    # Scored before and after only: an evaluation takes as long as one and a half iterations.
    config = replace(config, evaluate=replace(config.evaluate, every=options.iterations))
    with session.session(config, remark=say) as world:
        session.run(config, world)
    report = leave_report(out)
    data = read_run(out)
    if len(data.evaluations) < 2 or data.evaluations[-1]["iteration"] < config.iterations:
        return 0
    print(summary(data))
    print(f"\n{report}    ({time.perf_counter() - start:.0f} s)")
    print(NEXT.format(out=out, prompt=training_prompts(config.data)[0].text))
    return 0


def summary(run: RunData) -> str:
    from sage_grpo.tools.report.summary import MEANINGS, verdict

    before, after = run.evaluations[0], run.evaluations[-1]
    names = [name for name in MEANINGS if f"eval/{name}" in before]
    lines = [f"\nheld-out prompts   {'base':>8} {'tuned':>8} {'change':>8}"]
    for name in names:
        old, new = before[f"eval/{name}"], after[f"eval/{name}"]
        lines.append(f"{name:<18} {fixed(old, 3):>8} {fixed(new, 3):>8} {fixed(new - old, 3, signed=True):>8}")
    lines += ["", *(f"  {name:<6} {MEANINGS[name]}" for name in names)]
    return "\n".join([*lines, "", *verdict(run)])


NEXT = """
Next (in the environment: source .venv/bin/activate):
  sage-grpo demo --recipe shapes/branch --out runs/branch      one exploring step and one replay per group: as good in about half the time
  sage-grpo generate --run {out} --prompts "{prompt}"
  sage-grpo report {out} runs/branch                          both on one page
  sage-grpo inspect --steps 20 --shift 5                       what the samplers do
  sage-grpo train --recipe hunyuan15_lora --print_config       the same job on HunyuanVideo-1.5 with VideoAlign"""
