"""The benchmark of workers runs from end to end, and its table has what was measured beside what plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import needs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "workers.py"


@pytest.mark.slow
def test_three_ways_of_one_run(tmp_path: Path) -> None:
    find_spec("ray") or needs.lacking("ray")  # not imported: it would change this process
    words = ["--recipe", "shapes/branch", "--model.lora.rank", "4", "--iterations", "3", "--model.device", "cpu"]
    words += ["--batch.prompts", "2", "--batch.group_size", "2", "--batch.micro_batch", "1", "--evaluate.prompts", "1"]
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--share", "0", "--out", out, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    one, workers, ahead = found["runs"].values()
    assert one["iterations"] == workers["iterations"] == ahead["iterations"] == 2
    assert "crew/busy_s" not in one
    assert workers["crew/workers"] == ahead["crew/workers"] == 2
    assert workers["reward/total"] == one["reward/total"]  # the same clips, to the bit
    assert workers["crew/gap"] == 0
    assert (workers["crew/staleness"], ahead["crew/staleness"]) == (0, 1)
    assert found["plan"]["tasks"] == 2
    assert workers["crew/megabytes"] == pytest.approx(found["plan"]["task_megabytes"] * 2)
    assert "records, MB" in done.stdout
