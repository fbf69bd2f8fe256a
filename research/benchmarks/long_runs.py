"""Which settings take a long run furthest: the arms that `shapes/branch_long` was chosen from, first and again, with seeds below 1000 as the rules of docs/benchmark.md ask.

    PYTHONPATH=src python research/benchmarks/long_runs.py compare --suite long_runs --jobs 16 --out runs/long_runs
    PYTHONPATH=src python research/benchmarks/long_runs.py compare --suite long_cheap --jobs 16 --out runs/long_cheap

They are experiments as docs/compare.md describes them, beside those of the package: 12 to 14 and 5 minutes of one H200.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sage_grpo.cli.main import main
from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.suites import SUITES
from sage_grpo.tools.compare.suites.common import DRIFT, LONG_AS_FIRST, MEASURED, OVERALL, Size, judged

FALLING = {"optimizer.decay": "linear"}


def prompts(number: int, lr: float, **more: Any) -> dict[str, Any]:
    """So many prompts an iteration, and a rate that falls from `lr` to zero."""
    return {"batch.prompts": number, "optimizer.lr": lr, **FALLING, **more}


ARMS: Mapping[str, Mapping[str, Any]] = {
    "8p 7e-5": prompts(8, 7e-5),
    "8p 1e-4": prompts(8, 1e-4),
    "8p 1e-4 warm": prompts(8, 1e-4, **{"optimizer.warmup_updates": 60}),
    "8p 2e-4 eps": prompts(8, 2e-4, **{"optimizer.eps": 1e-3}),
    "8p 1e-4 234": prompts(8, 1e-4, **{"rollout.window.at": [2, 3, 4], "rollout.window.weights": [3, 1, 1]}),
    "8p 1e-4 24": prompts(8, 1e-4, **{"rollout.window.at": [2, 4]}),
    "16p 1e-4": prompts(16, 1e-4),
    "16p 7e-5": prompts(16, 7e-5),
    "8p lora 5e-4": prompts(8, 5e-4, **{"model.lora.rank": 16}),
    "8p 1e-4 decoupled": prompts(8, 1e-4, **{"advantage.decoupled": True}),
    "8p 1.4e-4 target": prompts(8, 1.4e-4, **{"optimizer.target_kl": 0.01, "optimizer.max_kl": 0.05}),
    "8p 1.4e-4 lower": prompts(8, 1.4e-4, **{"sentinel.action": "lower_lr"}),
    "4p 7e-5": prompts(4, 7e-5),
    "16p 1e-4 24": prompts(16, 1e-4, **{"rollout.window.at": [2, 4]}),
}

LATER = {"rollout.window.at": [2, 3], "rollout.window.weights": [3, 1]}
LATEST = {"rollout.window.at": [2, 3, 4], "rollout.window.weights": [3, 1, 1]}
CHEAP: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "24p 1.2e-4": (240, prompts(24, 1.2e-4)),
    "24p 1e-4 23": (240, prompts(24, 1e-4, **LATER)),
    "24p 1e-4 234": (236, prompts(24, 1e-4, **LATEST)),
    "16p 7e-5 23": (360, prompts(16, 7e-5, **LATER)),
    "16p 7e-5 234": (354, prompts(16, 7e-5, **LATEST)),
}
"""Iterations and settings of runs with two second-order steps after the branch, which make 35% fewer passes than `branch_long` did with three Euler steps."""


def long_cheap(size: Size = "full") -> Suite:
    """branch_long in 36% fewer passes; it has one size."""
    two = {"rollout.after_steps": 2, "rollout.solver": "ab2"}
    arms = [
        Arm(
            name=name,
            recipe="shapes/branch_long",
            options={**LONG_AS_FIRST, **two, "batch.micro_batch": 12 * settings["batch.prompts"], **settings},
            iterations=iterations,
        )
        for name, (iterations, settings) in CHEAP.items()
    ]
    return replace(
        long_runs(),
        name="long_cheap",
        title="Settings for a long run with fewer passes",
        question="What takes branch furthest in 172,800 passes, with two second-order steps after the branch?",
        arms=tuple(arms),
        baseline="24p 1.2e-4",
        seeds=(0, 1, 2),
        points=tuple(range(0, 360, 40)),  # a sentinel that goes back goes to one of these
    )


def long_runs(size: Size = "full") -> Suite:
    """The suite; it has one size."""
    return Suite(
        name="long_runs",
        title="Settings for a long run",
        question="What takes branch furthest in 400 iterations, and what makes it lose something on the way?",
        arms=tuple(Arm(name=name, recipe="shapes/branch", options=options) for name, options in ARMS.items()),
        baseline="8p 1e-4",
        seeds=(0, 1, 2, 3),
        options={**MEASURED, "rewards": judged()},
        iterations=400,
        points=(0, 100, 200, 300, 400),
        columns=(OVERALL, *(Column(key=key) for key in ("VQ", "MQ", "TA", "TA/shape", "TA/size")), DRIFT),
    )


if __name__ == "__main__":
    SUITES |= {"long_runs": long_runs, "long_cheap": long_cheap}
    sys.exit(main(sys.argv[1:]))
