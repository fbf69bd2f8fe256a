"""Several suites in one call, some arms of a suite, and what a call does with runs that were cut off: all but the computing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli import main
from sage_grpo.lab import machine, store, suites, worker
from sage_grpo.lab import run as lab
from sage_grpo.lab.design import Arm, Suite
from sage_grpo.lab.prepare import Job, head, prepare
from sage_grpo.lab.worker import read
from sage_grpo.recipes import recipe
from sage_grpo.training.config import TrainConfig


class Here:
    """A worker without a process or a model: what it scores is its key. It keeps an account of what it was asked for."""

    asked: list[str]
    fails: Callable[[Job], bool]

    def __init__(self, folder: Path, number: int, environment: Mapping[str, str]) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def ready(self) -> bool:
        """Always."""
        return True

    def answer(self, line: str) -> Iterator[dict[str, Any]]:
        """A row."""
        words = json.loads(line)
        weights, _, _ = (words.pop(name) for name in ("weights", "unfinished", "file"))
        job = Job(**{**words, "config": TrainConfig(iterations=1)})
        self.asked.append(job.key)
        yield {"done": job.config.iterations}
        if weights is not None:
            Path(weights).mkdir(parents=True)
            (Path(weights) / "model").write_text(job.key)
        score = {"total": int(job.key, 16) / 2**64, "drift": 0.1}
        status = "failed" if type(self).fails(job) else "done"
        row = {
            **head(job, status, "broken" if status == "failed" else None),
            **{"reached": 1, "evaluations": {"0": score, "1": score}, "passes": {"0": 0, "1": 5}, "updates": 1},
            **{"training": {}, "steps": {}, "sentinel": [], "seconds": {"iteration": 0, "evaluate": 0, "total": 0}},
            **{"machine": {"device": "here"}, "versions": {}, "commit": "", "code": ""},
        }
        yield {"row": row}

    def close(self, *, now: bool) -> None:
        """Nothing runs."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    """Runs are made by `Here`."""
    Here.asked, Here.fails = [], staticmethod(lambda job: False)  # type: ignore[assignment]
    monkeypatch.setattr(machine, "Process", Here)
    return Here


@pytest.fixture
def two(toy_suite: Suite, monkeypatch: pytest.MonkeyPatch) -> dict[str, Suite]:
    """Suites `one` and `other` with a run in common per seed, under different names."""
    plain, lr = Arm(name="plain", recipe="shapes/sage"), {"optimizer.lr": 2e-3}
    small = replace(toy_suite, iterations=1, figures=())
    found = {
        "one": replace(small, name="one", baseline="plain", arms=(plain, Arm(name="b", recipe="shapes/branch"))),
        "other": replace(
            small,
            name="other",
            baseline="same",
            arms=(replace(plain, name="same"), replace(plain, name="fast", options=lr)),
        ),
    }
    monkeypatch.setattr(suites, "SUITES", {name: lambda size, suite=suite: suite for name, suite in found.items()})
    monkeypatch.setattr(sys, "argv", ["sage-grpo", "compare"])  # what a report says of its command
    return found


def compare(*words: str) -> int:
    """Exit status of the command."""
    return main(["compare", *words, "--jobs", "1"])


def written(folder: Path) -> dict[str, str]:
    """What a folder holds, without logs."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and "logs" not in file.parts]
    return {str(file.relative_to(folder)): file.read_text() for file in files}


@pytest.mark.slow
@pytest.mark.usefixtures("two")
def test_several_suites_share_runs_and_leave_what_single_calls_leave(
    here: type[Here], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--suite", "one,other", "--out", str(tmp_path / "both"), "--weights") == 0
    assert len(here.asked) == len(set(here.asked)) == 6  # and not 8
    told = capsys.readouterr()
    assert "6/6" in told.err
    assert f"-C {tmp_path} both" in told.out
    for name in ("one", "other"):
        assert compare("--suite", name, "--out", str(tmp_path / name), "--weights") == 0
        both, alone = written(tmp_path / "both" / name), written(tmp_path / name)
        assert both.keys() == alone.keys() >= {"runs.jsonl", "suite.json", "report.md", "table.md", "table.json"}
        rows = [sorted(files.pop("runs.jsonl").splitlines()) for files in (both, alone)]
        assert rows[0] == rows[1]
        assert both == alone
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["logs", "one", "other"]
    tables = (tmp_path / "other" / "table.md").read_text().strip()
    capsys.readouterr()
    assert main(["compare", "--table", str(tmp_path / "both")]) == 0
    assert tables in capsys.readouterr().out

    before = written(tmp_path / "both")
    assert main(["compare", "--table", str(tmp_path / "both"), "--out", str(tmp_path / "drawn")]) == 0
    assert f"Report: {tmp_path / 'drawn' / 'other' / 'report.md'}" in capsys.readouterr().out
    assert written(tmp_path / "both") == before
    drawn = written(tmp_path / "drawn")
    assert drawn["other/table.md"].strip() == tables
    assert drawn.items() <= before.items()  # the same, and without rows

    for other in ("one", "both"):  # the rows of others, in it or in a folder of it
        assert main(["compare", "--table", str(tmp_path / "both" / "other"), "--out", str(tmp_path / other)]) != 0
        assert "has runs of its own, whose tables would be overwritten: name another --out" in capsys.readouterr().err
    assert written(tmp_path / "both") == before


@pytest.mark.parametrize("words", [["shapes/sage"], ["--seeds", "3"]])
def test_what_asks_for_runs_is_refused_where_only_tables_are_drawn(words: list[str], tmp_path: Path, capsys) -> None:
    assert main(["compare", *words, "--table", str(tmp_path)]) != 0
    name = words[0].removeprefix("--") if words[0].startswith("--") else "recipes"
    assert f"runs nothing: leave out {name}." in capsys.readouterr().err


def call(
    jobs: Mapping[str, list[Job]], two: Mapping[str, Suite], folders: Mapping[str, Path], **more: Any
) -> lab.Ended:
    """A call for the suites of these folders."""
    parts = [
        lab.Part(folder=folder, suite=two[name], jobs=jobs[name], arms=more.get("arms"))
        for name, folder in folders.items()
    ]
    return lab.run(parts, out=parts[0].folder, command="", engine=machine.Machine(), side_by_side=1)


def test_a_run_that_one_suite_has_is_not_made_for_another_and_a_fault_is_told_to_both(
    here: type[Here], two: dict[str, Suite], tmp_path: Path
) -> None:
    jobs = {name: prepare(suite, recipe) for name, suite in two.items()}
    both = {name: tmp_path / name for name in ("other", "one")}
    common = {job.key for job in jobs["one"] if job.arm == "plain"}
    here.fails = lambda job: job.key in common  # type: ignore[assignment]
    assert call(jobs, two, both) == lab.Ended(finished=4, failed=2, missing=0)
    for folder in both.values():
        rows = store.read_rows(folder / "runs.jsonl")
        assert sorted(row["status"] for row in rows) == ["done", "done", "failed", "failed"]
    here.fails, here.asked = (lambda job: False), []  # type: ignore[assignment]
    assert call(jobs, two, {"one": both["one"]}) == lab.Ended(finished=4, failed=0, missing=0)
    assert set(here.asked) == common
    assert call(jobs, two, both) == lab.Ended(finished=6, failed=0, missing=0)
    assert len(here.asked) == 2  # other takes them from one
    last = store.read_rows(both["other"] / "runs.jsonl")[-1]
    assert (last["arm"], last["suite"], last["status"]) == ("same", "other", "done")
    anew = {name: tmp_path / f"{name} anew" for name in both}
    assert call(jobs, two, anew) == lab.Ended(finished=6, failed=0, missing=0)
    assert not any((folder / "weights").exists() for folder in anew.values())  # nobody asked for them


def test_a_call_for_some_arms_leaves_the_others_missing(
    here: type[Here], two: dict[str, Suite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--suite", "one", "--arms", "b", "--out", str(tmp_path)) == 0
    told = capsys.readouterr().err
    assert "2 runs to make, 1 side by side on the CPU" in told
    assert "1/2  b, seed 1: Overall 0." in told
    assert "2/2  b, seed 2: Overall 0." in told
    rows = store.read_rows(tmp_path / "runs.jsonl")
    assert [row["arm"] for row in rows] == ["b", "b"]
    suite, keys, _ = store.load_suite(tmp_path)
    assert ([arm.name for arm in suite.arms], len(keys)) == (["plain", "b"], 4)
    assert "2 missing" in (tmp_path / "table.md").read_text()
    here.asked = []
    assert call({"one": prepare(two["one"], recipe)}, two, {"one": tmp_path}).finished == 4
    assert len(here.asked) == 2


def test_runs_that_were_cut_off_come_first_and_are_forgotten_with_a_row_that_is_no_fault(
    here: type[Here], two: dict[str, Suite], tmp_path: Path
) -> None:
    jobs = {"one": prepare(two["one"], recipe)}
    over, faulty, _, cut_off = (job.key for job in jobs["one"])
    here.fails = lambda job: job.key == faulty  # type: ignore[assignment]
    first = {"one": jobs["one"][:1]}
    assert call(first, two, {"one": tmp_path}).finished == 1
    foreign = "0" * 16
    for key, at in {over: 1, faulty: 2, cut_off: 3, foreign: 4}.items():  # `over` was killed after its row was written
        (store.place(tmp_path, key) / f"{at:06d}").mkdir(parents=True)
    store.save_suite(tmp_path, two["one"], [job.key for job in jobs["one"]], "")
    assert store.unfinished(tmp_path).startswith("2 run(s) are unfinished, kept after iterations 2 to 3.")
    here.asked = []
    assert call(jobs, two, {"one": tmp_path}) == lab.Ended(finished=3, failed=1, missing=0)
    assert here.asked[:2] == [faulty, cut_off]
    assert {path.name for path in (tmp_path / store.UNFINISHED).iterdir()} == {faulty, foreign}
    here.fails = lambda job: False  # type: ignore[assignment]
    call(jobs, two, {"one": tmp_path})
    assert store.unfinished(tmp_path) == ""
    assert [path.name for path in (tmp_path / store.UNFINISHED).iterdir()] == [foreign]


ORPHAN = """
import time
from sage_grpo.lab.worker import jobs
for line in jobs():
    print(line.strip(), flush=True)
    time.sleep(20)
"""


@pytest.mark.slow
def test_a_worker_ends_with_whoever_asked_in_the_middle_of_a_run_too() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("long\n")
        assert process.stdout.readline() == "long\n"
        assert process.communicate() == ("", None)  # closes stdin, as a parent's end does
        assert process.returncode == 1


def test_a_request_says_where_a_run_is_kept(toy_suite: Suite, tmp_path: Path) -> None:
    job, *_ = prepare(toy_suite, recipe)
    lab.write_config(job, tmp_path)
    found, weights, kept = read(json.dumps(lab.request(job, tmp_path, weights=False)))
    assert (found, weights, kept) == (job, None, store.place(tmp_path, job.key))


@pytest.mark.parametrize(("fails", "code"), [(None, 0), (RuntimeError("it broke"), 1), (BrokenPipeError(), 1)])
def test_a_worker_says_how_far_it_is_and_what_came_of_a_run(
    fails: Exception | None, code: int, toy_suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, *_ = prepare(toy_suite, recipe)
    lab.write_config(job, tmp_path)
    reading, writing = os.pipe()
    done_once: list[Any] = []

    def measure(
        found: Job, bases: dict[str, Any], progress: Any, weights: Any, unfinished: Path, tell: Any
    ) -> dict[str, Any]:
        assert (found, bases, weights, unfinished) == (job, {}, None, store.place(tmp_path, job.key))
        progress(1)
        tell("a note")
        if fails is not None:
            raise fails
        return {"key": found.key}

    monkeypatch.setattr("sage_grpo.lab.measure.measure", measure)
    monkeypatch.setattr(worker, "jobs", lambda: [json.dumps(lab.request(job, tmp_path, weights=False))])
    monkeypatch.setattr(worker.os, "dup", lambda number: writing)
    monkeypatch.setattr(worker.os, "dup2", lambda *numbers: done_once.append(numbers))
    monkeypatch.setattr("torch.set_num_threads", done_once.append)
    with warnings.catch_warnings():
        assert worker.main() == code
    assert done_once == [(2, 1), 1]  # what libraries print goes to the log; one thread
    os.close(writing)
    with os.fdopen(reading) as stream:
        ready, done, note, *row = map(json.loads, stream)
    assert (list(ready), done, note) == (["ready"], {"done": 1}, {"note": "a note"})
    if fails is None:
        assert row == [{"row": {"key": job.key}}]
    elif code and row:
        assert (row[0]["row"]["status"], row[0]["row"]["error"]) == ("failed", "RuntimeError: it broke")
    assert len(row) == (not isinstance(fails, BrokenPipeError))
