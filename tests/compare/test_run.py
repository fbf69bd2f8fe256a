"""Several suites in one call, some arms of a suite, and what a call does with runs that were cut off: all but the computing."""

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

from sage_grpo.config.parsing import parse
from sage_grpo.recipes import recipe
from sage_grpo.tools.compare import machine, store
from sage_grpo.tools.compare import run as lab
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.measure import measure
from sage_grpo.tools.compare.prepare import CompareJob, head, prepare
from sage_grpo.tools.compare.worker import RunRequest
from sage_grpo.training.config import TrainConfig


class Here:
    """A worker without a process or a model: what it scores is its key. It keeps an account of what it was asked for."""

    asked: list[str]
    fails: Callable[[CompareJob], bool]

    def __init__(self, folder: Path, number: int, environment: Mapping[str, str]) -> None:
        self.connection, self.process = Pipe()

    def begin(self, request: RunRequest) -> Any:
        job = request.job
        self.asked.append(job.key)
        self.process.send({"done": job.config.iterations})
        if request.weights is not None:
            request.weights.mkdir(parents=True)
            (request.weights / "model").write_text(job.key)
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

    def close(self, *, now: bool) -> None:
        self.connection.close()
        self.process.close()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    Here.asked, Here.fails = [], staticmethod(lambda job: False)  # type: ignore[assignment]
    monkeypatch.setattr(machine, "Worker", Here)
    return Here


def jobs_of(suite: Suite) -> list[CompareJob]:
    """Its runs, by hand: the key goes by settings and seed."""
    kinds = {"plain": "a", "same": "a", "b": "b", "fast": "c"}
    given = {"recipe": "shapes/sage", "settings": {}, "points": (1,), "kind": "train"}
    config = TrainConfig(iterations=1)
    named = [(arm.name, seed) for seed in suite.seeds for arm in suite.arms]
    return [CompareJob(arm=arm, seed=seed, key=f"{kinds[arm]}{seed}", config=config, **given) for arm, seed in named]


@pytest.fixture
def suites_of_two() -> dict[str, Suite]:
    """Suites `one` and `other` with a run in common per seed, under different names."""
    plain, same = (Arm(name=name, recipe="shapes/sage") for name in ("plain", "same"))
    b, fast = Arm(name="b", recipe="shapes/branch"), replace(same, name="fast", options={"optimizer.lr": 2e-3})
    given = {"title": "", "question": "", "seeds": (1, 2), "iterations": 1, "figures": ()}
    one = Suite(name="one", arms=(plain, b), baseline="plain", **given)
    return {"one": one, "other": Suite(name="other", arms=(same, fast), baseline="same", **given)}


def call(two: Mapping[str, Suite], folders: Mapping[str, Path], *, arms: Any = None, **more: Any) -> lab.CompareEnded:
    suites = [(two[name], folder) for name, folder in folders.items()]
    parts = [lab.SuiteRun(folder=folder, suite=one, jobs=jobs_of(one), arms=arms) for one, folder in suites]
    return lab.run(parts, out=parts[0].folder, command="the command", **{"side_by_side": 1, **more})


def test_a_run_that_one_suite_has_is_not_made_for_another_and_a_fault_is_told_to_both(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, both = suites_of_two, {name: tmp_path / name for name in ("other", "one")}
    here.fails = lambda job: job.key in ("a1", "a2")  # type: ignore[assignment]
    assert call(two, both) == lab.CompareEnded(finished=4, failed=2, missing=0)
    for folder in both.values():
        rows = store.read_rows(folder / "runs.jsonl")
        assert sorted(row["status"] for row in rows) == ["done", "done", "failed", "failed"]
    here.fails, here.asked = (lambda job: False), []  # type: ignore[assignment]
    assert call(two, {"one": both["one"]}, arms=["plain"]) == lab.CompareEnded(finished=2, failed=0, missing=0)
    assert here.asked == ["a1", "a2"]
    capsys.readouterr()
    assert call(two, both) == lab.CompareEnded(finished=6, failed=0, missing=0)
    assert "6 of 6 runs are there already." in capsys.readouterr().err
    assert len(here.asked) == 2  # other takes them from one
    last = store.read_rows(both["other"] / "runs.jsonl")[-1]
    assert (last["arm"], last["suite"], last["status"]) == ("same", "other", "done")
    anew = {name: tmp_path / f"{name} anew" for name in both}
    assert call(two, anew) == lab.CompareEnded(finished=6, failed=0, missing=0)
    assert not any((folder / "weights").exists() for folder in anew.values())  # nobody asked for them
    assert store.load_suite(anew["one"]) == (two["one"], ["a1", "b1", "a2", "b2"], "the command")
    assert len(list((anew["one"] / "configs").iterdir())) == 4


def test_weights_are_copied_to_every_suite_and_only_of_runs_that_are_done(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path
) -> None:
    here.fails = lambda job: job.seed == 2  # type: ignore[assignment]
    assert call(suites_of_two, {name: tmp_path / name for name in suites_of_two}, weights=True).failed == 3
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/weights/*1/model"))
    assert [name.split("-")[0] for name in found] == [
        "one/weights/b", "one/weights/plain", "other/weights/fast", "other/weights/same"
    ]  # fmt: skip


def test_a_call_for_some_arms_leaves_the_others_missing(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"one": tmp_path}
    assert call(suites_of_two, folders, arms=["b"]) == lab.CompareEnded(finished=2, failed=0, missing=0)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "2 runs to make, 1 side by side on the CPU.",
        "1/2  b, seed 1: Overall 0.0000  (0 s left)",
        "2/2  b, seed 2: Overall 0.0000  (0 s left)",
    ]
    assert [row["arm"] for row in store.read_rows(tmp_path / "runs.jsonl")] == ["b", "b"]
    assert call(suites_of_two, folders, budget=-1.0) == lab.CompareEnded(finished=2, failed=0, missing=2)
    here.asked = []
    assert call(suites_of_two, folders, budget=1000.0).finished == 4
    assert here.asked == ["a1", "a2"]


def test_runs_that_were_cut_off_come_first_and_are_forgotten_with_a_row_that_is_no_fault(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path
) -> None:
    folders, keys = {"one": tmp_path}, ["a1", "b1", "a2", "b2"]
    over, faulty, _, cut_off = keys
    assert call({"one": replace(suites_of_two["one"], seeds=(1,))}, folders, arms=["plain"]).finished == 1
    foreign = "0" * 16
    for key, at in (
        (over, 1),
        (faulty, 2),
        (cut_off, 3),
        (cut_off, 1),
        (foreign, 4),
    ):  # `over` was killed after its row
        (store.place(tmp_path, key) / f"{at:06d}").mkdir(parents=True)
    (store.place(tmp_path, faulty) / "odd").mkdir()
    store.save_suite(tmp_path, suites_of_two["one"], keys, "")
    told = "2 run(s) are unfinished, kept after iterations 2 to 3. The same command continues them."
    assert store.unfinished(tmp_path) == told
    here.fails, here.asked = (lambda job: job.key == faulty), []  # type: ignore[assignment]
    assert call(suites_of_two, folders) == lab.CompareEnded(finished=3, failed=1, missing=0)
    assert here.asked == [faulty, cut_off, "a2"]
    assert {path.name for path in (tmp_path / store.UNFINISHED).iterdir()} == {faulty, foreign}
    assert "1 run(s) are unfinished, kept after iteration 2." in store.unfinished(tmp_path)
    here.fails = lambda job: False  # type: ignore[assignment]
    call(suites_of_two, folders)
    assert store.unfinished(tmp_path) == ""
    assert [path.name for path in (tmp_path / store.UNFINISHED).iterdir()] == [foreign]


def test_a_request_says_where_a_run_is_kept_and_its_configuration_is_a_file(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path
) -> None:
    job = replace(jobs_of(suites_of_two["one"])[3], arm="b at [1, 2]")
    part = lab.SuiteRun(folder=tmp_path, suite=suites_of_two["one"], jobs=[job])
    folder, unfinished = lab.SuiteFolder(part, "", print), store.place(tmp_path, job.key)
    assert (job.name, job.file) == ("b at [1, 2], seed 2", "b-at-1-2--b2.yaml")
    assert folder.request(job, weights=False) == RunRequest(job=job, weights=None, unfinished=unfinished)
    assert folder.request(job, weights=True).weights == tmp_path / "weights" / "b-at-1-2--b2-2"
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
    assert (done.returncode, "goes on after iteration" in done.stderr) == (0, True), done.stderr
    rows = {row["key"]: row for row in store.read_rows(out / store.ROWS)}
    for job in prepare(store.load_suite(out)[0], recipe):
        whole = json.loads(json.dumps(measure(job, {}, lambda done: None)))
        assert {**rows[job.key], "seconds": None} == {"suite": "out", **whole, "seconds": None}
