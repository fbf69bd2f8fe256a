"""The whole command in processes of its own: killed in the middle and continued, with an arm that fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli import main
from sage_grpo.commands.compare import Options, suites_of
from sage_grpo.configure import ConfigError
from sage_grpo.lab import leaderboard, store
from sage_grpo.lab.measure import measure
from sage_grpo.lab.prepare import prepare
from sage_grpo.recipes import recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What runs.jsonl holds."""
    file = folder / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def unfinished(folder: Path) -> list[Path]:
    """The points at which runs are kept that have no row yet."""
    over = [row["key"] for row in rows_of(folder)]
    return [point for point in folder.glob("unfinished/*/[0-9]*") if point.parent.name not in over]


@pytest.mark.dist
def test_killed_and_continued_with_a_run_that_fails(
    tmp_path: Path,
    toy_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two arms x two seeds on the CPU, first those of one arm; the kill comes in the middle of the second run, which goes on from its last
    point. `trainer_toys:broken` is refused by the try-out of rewards, in the worker."""
    out = tmp_path / "out"
    toy_options.pop("rewards")
    good, bad = (json.dumps([{"name": f"trainer_toys:{name}", "batch_size": 0}]) for name in ("bright", "broken"))
    words = ["compare", "shapes/sage", "--vary", f"rewards={good},{bad}", "--seeds", "2", "--iterations", "24"]
    words += ["--points", "[4,8,12,16,20]"]
    words += ["--set", *(f"{key}={value}" for key, value in toy_options.items()), "--jobs", "1", "--out", str(out)]
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    first = [*words, "--arms", json.dumps([f"shapes/sage rewards={good}"])]
    process = subprocess.Popen([sys.executable, "-m", "sage_grpo", *first], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not (rows_of(out) and unfinished(out)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (out / "runs.jsonl").read_bytes()
    kept = [json.loads(line) for line in before.splitlines()]
    assert [row["status"] for row in kept] == ["done"]
    assert unfinished(out), "it was to be killed in the middle of a run"
    (out / "runs.jsonl").write_bytes(before + b'{"format": 1, "arm": "shap')  # as if while writing a row

    monkeypatch.setattr(sys, "argv", ["sage-grpo", *words])
    assert main(words) == 1  # runs failed
    told = capsys.readouterr()
    assert "was cut off" in told.err
    assert re.search(r"seed 1001: goes on after iteration [1-9]", told.err)
    assert not (out / "unfinished").exists()
    rows = rows_of(out)
    done = [row for row in rows if row["status"] == "done"]
    assert rows[:1] == kept
    assert sorted(row["seed"] for row in done) == [1000, 1001]  # none of them twice
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["seed"] for row in failed} == {1000, 1001}
    assert "the reward's machine is gone" in failed[-1]["error"]
    (job,) = [job for job in prepare(store.load_suite(out)[0], recipe) if job.key == done[1]["key"]]
    whole = json.loads(json.dumps(measure(job, {}, lambda done: None)))  # to the bit what nobody disturbed
    assert {**done[1], "seconds": None} == {"suite": "out", **whole, "seconds": None}
    table = (out / "table.md").read_text()
    assert "2 failed" in table
    assert table.strip() in told.out
    assert len(list((out / "configs").glob("*.yaml"))) == 4

    assert main(["compare", "--table", str(out)]) == 0
    assert (out / "table.md").read_text() == table


def test_as_a_benchmark_every_arm_keeps_the_rules() -> None:
    (suite,) = suites_of(Options(recipes=["shapes/branch"], vary=["kernel.eta=1.0,1.2"], benchmark=True))
    assert suite.seeds == leaderboard.EDITION.seeds
    assert {"passes": suite.passes, "clips": suite.clips} == leaderboard.BUDGETS
    for job in prepare(suite, recipe):
        assert {name: job.settings[name] for name in leaderboard.EVALUATION} == leaderboard.EVALUATION
    with pytest.raises(ConfigError, match="leave out --seeds"):
        suites_of(Options(recipes=["shapes/branch"], seeds=3, benchmark=True))
