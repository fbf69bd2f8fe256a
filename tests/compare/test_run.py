"""Missing runs, some arms of a suite, and runs that were cut off: all but the computing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli.compare import start as recipe
from sage_grpo.config.parsing import parse
from sage_grpo.tools.compare import run as comparison
from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.measure import measure
from sage_grpo.tools.compare.prepare import CompareJob, head, prepare
from sage_grpo.training.config import TrainConfig


class Here:
    """A worker without a process or a model: what it scores is its key. It keeps an account of what it was asked for."""

    asked: list[str]
    fails: Callable[[CompareJob], bool]

    def __init__(self, folder: Path, number: int, environment: Mapping[str, str], weights: bool) -> None:
        self.connection, self.process = Pipe()

    def begin(self, job: CompareJob) -> Any:
        self.asked.append(job.key)
        score = {"total": int(job.key, 16) / 2**64, "drift": 0.1}
        status = "failed" if type(self).fails(job) else "done"
        row = {
            **head(job, status, "broken" if status == "failed" else None),
            **{"reached": 1, "evaluations": {"0": score, "1": score}, "passes": {"0": 0, "1": 5}, "updates": 1},
            **{"training": {}, "steps": {}, "sentinel": [], "seconds": {"iteration": 0, "evaluate": 0, "total": 0}},
            **{"machine": {"device": "here"}, "versions": {}, "commit": "", "code": ""},
        }
        self.process.send({"row": row})
        return self.connection

    def receive(self) -> Any:
        return self.connection.recv()

    def close(self) -> None:
        self.connection.close()
        self.process.close()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    Here.asked, Here.fails = [], staticmethod(lambda job: False)  # type: ignore[assignment]
    monkeypatch.setattr(comparison, "Worker", Here)
    return Here


SUITE = Suite(
    name="one", title="", question="", seeds=(1, 2), iterations=1, figures=(), baseline="plain",
    arms=(Arm(name="plain", recipe="shapes/sage"), Arm(name="b", recipe="shapes/branch")),
)  # fmt: skip
KEYS = ["a1", "b1", "a2", "b2"]


def jobs() -> list[CompareJob]:
    given: Any = {"recipe": "shapes/sage", "settings": {}, "points": (1,), "kind": "train"}
    named = [(arm.name, seed) for seed in SUITE.seeds for arm in SUITE.arms]
    config = TrainConfig(iterations=1)
    return [CompareJob(arm=a, seed=n, key=key, config=config, **given) for (a, n), key in zip(named, KEYS)]


def call(folder: Path, **more: Any) -> int:
    """The number of failed runs; runs that are asked for are counted from 0."""
    Here.asked = []
    return comparison.run(folder, SUITE, jobs(), command="the command", **{"side_by_side": 1, **more})


def test_a_call_makes_what_is_missing_and_what_failed(here: type[Here], tmp_path: Path, capsys) -> None:
    here.fails = lambda job: job.seed == 2  # type: ignore[assignment]
    assert call(tmp_path) == 2
    assert store.load_suite(tmp_path) == (SUITE, KEYS, "the command")
    assert len(list((tmp_path / "configs").iterdir())) == 4
    here.fails = lambda job: False  # type: ignore[assignment]
    assert call(tmp_path) == 0
    assert here.asked == ["a2", "b2"]
    rows = store.read_rows(tmp_path / store.ROWS)
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed", "done", "done"]
    assert {row["suite"] for row in rows} == {"one"}
    capsys.readouterr()
    assert (call(tmp_path), here.asked) == (0, [])
    assert "4 of 4 runs are there already." in capsys.readouterr().err


def test_a_call_for_some_arms_leaves_the_others_missing(here: type[Here], tmp_path: Path, capsys) -> None:
    assert call(tmp_path, arms=["b"]) == 0
    told = capsys.readouterr().err.splitlines()
    runs = ["1/2  b, seed 1: Overall 0.0000", "2/2  b, seed 2: Overall 0.0000"]
    assert told == ["2 runs to make, 1 side by side on the CPU.", *runs]
    assert [row["arm"] for row in store.read_rows(tmp_path / "runs.jsonl")] == ["b", "b"]


def test_runs_that_were_cut_off_come_first_and_are_forgotten_with_a_row_that_is_no_fault(
    here: type[Here], tmp_path: Path
) -> None:
    over, faulty, _, cut_off = KEYS
    comparison.run(tmp_path, replace(SUITE, seeds=(1,)), jobs()[:2], command="", arms=["plain"], side_by_side=1)
    foreign = "0" * 16
    # `over` was killed after its row
    for key, at in ((over, 1), (faulty, 2), (cut_off, 3), (cut_off, 1), (foreign, 4)):
        (store.place(tmp_path, key) / f"{at:06d}").mkdir(parents=True)
    (store.place(tmp_path, faulty) / "odd").mkdir()
    store.save_suite(tmp_path, SUITE, KEYS, "")
    assert store.kept(tmp_path, KEYS[1:]) == {faulty: 2, cut_off: 3}
    here.fails = lambda job: job.key == faulty  # type: ignore[assignment]
    assert call(tmp_path) == 1
    assert here.asked == [faulty, cut_off, "a2"]
    assert {path.name for path in (tmp_path / store.UNFINISHED).iterdir()} == {faulty, foreign}
    here.fails = lambda job: False  # type: ignore[assignment]
    call(tmp_path)
    assert [path.name for path in (tmp_path / store.UNFINISHED).iterdir()] == [foreign]


def test_the_configuration_of_a_run_is_a_file(here: type[Here], tmp_path: Path) -> None:
    job = replace(jobs()[3], arm="b at [1, 2]")
    assert (job.name, job.file) == ("b at [1, 2], seed 2", "b-at-1-2--b2.yaml")
    comparison.run(tmp_path, SUITE, [job], command="")
    assert parse(TrainConfig, ["--config", str(tmp_path / "configs" / job.file)], prog="train") == job.config


@pytest.mark.slow
def test_interrupted_and_continued_its_rows_are_those_of_runs_that_nobody_disturbed(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    out, root = tmp_path / "out", Path(__file__).parents[2]
    options = {key: value if isinstance(value, str) else json.dumps(value) for key, value in toy_options.items()}
    words = ["compare", "shapes/sage", "shapes/branch", "--seeds", "1", "--iterations", "96", "--jobs", "2"]
    words += ["--points", json.dumps(list(range(4, 96, 4))), "--out", str(out)]
    command = [sys.executable, "-m", "sage_grpo", *words, "--set", *(f"{key}={options[key]}" for key in options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")])}
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE) as process:
        while not list(out.glob("unfinished/*/[0-9]*")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert "The same command continues" in process.communicate()[1]
    assert process.returncode == 130
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert (done.returncode, "continues after iteration" in done.stderr) == (0, True), done.stderr
    rows = {row["key"]: row for row in store.read_rows(out / store.ROWS)}
    for job in prepare(store.load_suite(out)[0], recipe):
        whole = json.loads(json.dumps(measure(job, {})))
        assert {**rows[job.key], "seconds": None} == {"suite": "out", **whole, "seconds": None}
