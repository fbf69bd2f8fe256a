"""What the tests of comparisons share: rows by hand, and a suite on the trainer's toy model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.lab.design import Arm, Suite

TOYS = Path(__file__).parent.parent / "train"
sys.path.insert(0, str(TOYS))

MakeRow = Callable[..., dict[str, Any]]


def row(
    arm: str, seed: int, curve: dict[int, float], *, cost: int = 10, status: str = "done", **more: Any
) -> dict[str, Any]:
    """A row of a run with this curve; `cost` passes an iteration. Its drift is a tenth of the score."""
    iterations = more.pop("iterations", max(curve, default=0))
    return {
        "format": 1, "arm": arm, "recipe": "shapes/sage", "seed": seed, "key": f"{arm}/{seed}", "kind": "train", "status": status,
        "error": None if status == "done" else "why", "iterations": iterations, "settings": {"optimizer.lr": 1e-3}, "reached": iterations,
        "evaluations": {str(n): {"total": value, "drift": value / 10} for n, value in curve.items()},
        "passes": {str(n): n * cost for n in curve}, "updates": 2 * iterations, "training": {"iteration": []},
        "steps": {"0": {"std": 0.5, "sensitivity": 2.0, "raw": 4.0, "sent": 1.0}},
        "seconds": {"iteration": 1.0, "evaluate": 2.0, "total": 3.0},
        "machine": {"device": "a machine"}, "versions": {"torch": "2"}, "commit": "abc", "code": "1/2", **more,
    }  # fmt: skip


@pytest.fixture
def toy_options(tmp_path: Path) -> dict[str, Any]:
    """Settings that turn any shapes recipe into a run of the toy model that takes a blink."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na red dog\na bird\nthe sea\n")
    return {
        "model.family": "trainer_zoo.toy",
        "rewards": [{"name": "trainer_toys:bright", "batch_size": 0}],
        "data.prompts": str(prompts),
        "data.eval_prompts": str(prompts),
        "batch.prompts": 2,
        "batch.group_size": 4,
        "batch.micro_batch": 4,
        "rollout.steps": 5,
        "optimizer.lr": 1e-3,
        "evaluate.prompts": 2,
        "evaluate.steps": 3,
    }


@pytest.fixture
def toy_suite(toy_options: dict[str, Any]) -> Suite:
    """Two arms x two seeds x two iterations."""
    arms = (Arm(name="sage", recipe="shapes/sage"), Arm(name="branch", recipe="shapes/branch"))
    return Suite(
        name="toy",
        title="Toys",
        question="?",
        arms=arms,
        baseline="sage",
        seeds=(1, 2),
        options=toy_options,
        iterations=2,
    )
