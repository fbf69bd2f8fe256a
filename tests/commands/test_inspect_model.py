"""`sage-grpo inspect --model`: the grid of a checkpoint's own scheduler, from its configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

import tiny
from sage_grpo import cli
from sage_grpo.models.schedulers import own_sigmas


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("wan21_t2v", tmp_path_factory.mktemp("inspect") / "wan", shift=3.0)


def _inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict]:
    assert cli.main(["inspect", "--json", "--figure", "null", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_grid_is_the_checkpoints_own(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(checkpoint / "scheduler")
    document = _inspected(capsys, "--model", str(checkpoint), "--steps", "20", "--kernels", '["sage", "sage_exact"]')
    own = own_sigmas(scheduler, 20, 3.0, even=False)
    assert [row["sigma"] for row in document["kernels"]["sage"]["rows"]] == pytest.approx(own[:-1].tolist())
    assert document["shift"] == 3.0
    told = document["kernels"]["sage"]["warnings"]
    assert any("Step 18 is deterministic, too" in text for text in told)
    assert not any("deterministic, too" in text for text in document["kernels"]["sage_exact"]["warnings"])
    shifted = _inspected(capsys, "--model", str(checkpoint), "--steps", "20", "--shift", "7", "--kernels", '["sage"]')
    other = own_sigmas(scheduler, 20, 7.0, even=False)
    assert [row["sigma"] for row in shifted["kernels"]["sage"]["rows"]] == pytest.approx(other[:-1].tolist())
    assert shifted["shift"] == 7.0
