"""Seconds of one HunyuanVideo-1.5 iteration by method: the passes that its plan states times the seconds that a pass was measured to take.

    PYTHONPATH=src python research/benchmarks/branch_iteration.py research/benchmarks/results/full_size_h200.json

Passes come from the same plan that training executes (4 prompts x 4 clips, 20 steps, recipe hunyuan15_lora/METHOD); seconds from
the file: a guided forward pass is two of its forward passes, a guided replay is its backward pass, which includes
the forward ones. Rewards and the optimizer are left out: they are the same for all methods and small beside this.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sage_grpo.data.prompts import Prompt
from sage_grpo.recipes import recipe
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.planner import Planner, foresee
from sage_grpo.utils.text import fixed, markdown


def configurations() -> dict[str, TrainConfig]:
    """Methods to compare, at equal prompts, clips and steps."""
    branch = recipe("hunyuan15_lora/branch")
    quick = replace(branch, rollout=replace(branch.rollout, solver="ab2", after_steps=7))
    return {
        "sage": recipe("hunyuan15_lora/sage"),
        "mix_grpo": recipe("hunyuan15_lora/mix_grpo"),
        "flash_grpo": recipe("hunyuan15_lora/flash_grpo"),
        "branch": branch,
        "branch, ab2, 7 steps after": quick,
    }


@dataclass(frozen=True)
class Row:
    """A method: passes that sample, that run the anchor, and that go forward and backward, seconds, and times as fast as the first."""

    method: str
    sampling: int
    anchor: int
    training: int
    seconds: float
    times_as_fast: float


HEADS = ["method", "sampling passes", "anchor passes", "forward and backward", "seconds", "times as fast as sage"]


def cells(row: Row) -> list[str]:
    """As a table has it."""
    counts = [str(count) for count in (row.sampling, row.anchor, row.training)]
    return [row.method, *counts, fixed(row.seconds, 0), fixed(row.times_as_fast, 2)]


def rows(file: Path) -> list[Row]:
    """All methods."""
    measured = json.loads(file.read_text())
    lora = measured["backward_lora"]["plain"]
    forward, backward, decode = 2 * lora["forward_seconds"], lora["seconds"], measured["decode"]["seconds"]
    found, slowest = [], None
    for name, config in configurations().items():
        grid = Schedule.shifted(config.rollout.steps, 5.0)
        planner = Planner(config, grid, config.kernel.build(grid), trains=lambda sigma: True)
        plan = foresee(config, planner.plan(0, [Prompt(str(place)) for place in range(config.batch.prompts)]))
        sample, replay = plan.rollout_passes(0).total(), sum(Lockstep(plan).rounds)
        anchor = replay if config.trust_region.uses_anchor else 0
        clips = len(plan.groups) * plan.group_size
        seconds = (sample + anchor) * forward + replay * backward + clips * decode
        slowest = slowest or seconds
        found.append(Row(name, sample, anchor, replay, seconds, slowest / seconds))
    return found


def main() -> int:
    """Print a table."""
    print("\n".join(markdown(HEADS, map(cells, rows(Path(sys.argv[1]))))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
