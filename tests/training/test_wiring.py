"""Every field of TrainConfig does what wiring_table.py says, and nothing before it in the line of data changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wiring
from wiring_table import ELSEWHERE, ROWS

from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.training.config import TrainConfig
from sage_grpo.video import write_mp4

_KNOWN: dict[str, Any] = {}
"""What the base runs did: most rows share theirs."""


@pytest.fixture
def base(make_config, prompts: Path, tmp_path: Path) -> Callable[[str], tuple[TrainConfig, TrainConfig]]:
    """key -> the configuration of its row, without and with the change."""

    def make(key: str) -> tuple[TrainConfig, TrainConfig]:
        row = ROWS[key]
        config = make_config(
            iterations=4,
            rewards=[
                RewardSpec(name="trainer_toys:two_parts", weights={"level": 1.0, "texture": 0.5}),
                RewardSpec(name="trainer_toys:bright", weights={"bright": 0.1}, options={"differentiable": True}),
            ],
            kl=KlCoefficient(lambda_min=0.1, lambda_max=1.0, warmup_updates=3),
        )
        config = wiring.changed(config, row.base)
        return config, wiring.changed(config, {key: _value(row.to, prompts, tmp_path)})

    return make


def _known(phase: Any, config: TrainConfig) -> Any:
    key = f"{phase.__name__}/{dataclasses.replace(config, out='-')}"
    if key not in _KNOWN:
        _KNOWN[key] = phase(config)
    return _KNOWN[key]


def _value(value: Any, prompts: Path, folder: Path) -> Any:
    """Values that are files are made here."""
    if value == "OTHER_PROMPTS":
        file = folder / "other.txt"
        file.write_text("a fox\na house\nrain\n")
        return str(file)
    if value == "EXAMPLES":
        for name, grey in (("win", 200), ("lose", 50)):
            write_mp4(folder / f"{name}.mp4", torch.full((2, 8, 8, 3), grey, dtype=torch.uint8), 8.0)
        file = folder / "pairs.jsonl"
        file.write_text('{"prompt": "a cat", "win": "win.mp4", "lose": "lose.mp4"}')
        return str(file)
    return value


def test_every_field_has_a_row_or_a_place() -> None:
    elsewhere = [key for keys in ELSEWHERE.values() for key in keys.split()]
    assert sorted([*ROWS, *elsewhere]) == sorted(wiring.leaf_fields(TrainConfig))
    assert all((Path(__file__).parents[2] / place).exists() for place in ELSEWHERE)


@pytest.mark.parametrize("key", ROWS)
def test_a_field_changes_its_phase_and_nothing_before_it(key: str, base) -> None:
    row, (config, other) = ROWS[key], base(key)
    assert wiring.first_difference(_known(wiring.training, config), wiring.training(other)) == row.changes
    assert wiring.equal(_known(wiring.evaluation, config), wiring.evaluation(other)) != row.evaluation
