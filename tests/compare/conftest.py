"""What the tests of comparisons share: rows by hand, and a suite on the trainer's toy model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sage_grpo.tools.compare.design import Arm, Suite


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
    arms = (Arm(name="sage", recipe="shapes/sage"), Arm(name="branch", recipe="shapes/branch"))
    named = {"name": "toy", "title": "Toys", "question": "?", "baseline": "sage"}
    return Suite(**named, arms=arms, seeds=(1, 2), options=toy_options, iterations=2)
