"""Workers side by side: faults are recorded and others go on, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_worker
import pytest

from sage_grpo.recipes import recipe
from sage_grpo.tools.compare import run as comparison
from sage_grpo.tools.compare import worker
from sage_grpo.tools.compare.prepare import CompareJob
from sage_grpo.tools.compare.worker import Worker, make_all


def job(arm: str) -> Any:
    """Plain data, which a process reads without importing torch."""
    given = {"recipe": "r", "settings": {}, "kind": "train", "config": SimpleNamespace(iterations=2)}
    return SimpleNamespace(arm=arm, seed=0, key=f"{arm}/0", name=arm, file=f"{arm}.yaml", **given)


def workers(folder: Path, count: int = 1) -> list[Worker]:
    return [Worker(folder, n, {"OWN": "yes"}, body=fake_worker.serve) for n in range(count)]


def test_a_run_that_fails_or_takes_its_process_along_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    rows, notes = list[dict[str, Any]](), list[str]()
    ended = {"ok 0": "done", "ok 1": "done", "fails": "failed", "ok 2": "done", "dies": "failed", "ok 3": "done"}
    make_all(
        map(job, ended),
        workers(tmp_path),
        lambda job, row: rows.append(row),
        lambda job, text: notes.append(f"{job.arm} {text}"),
    )
    assert [(row["arm"], row["status"]) for row in rows] == list(ended.items())
    first, second, broken, after, died, _ = rows
    assert first["pid"] == second["pid"] == broken["pid"] != after["pid"]  # one process makes many
    assert broken["error"] == "it broke"
    assert "ended with 9" in died["error"]
    assert "worker-00.log" in died["error"]
    assert died["key"] == "dies/0"
    assert notes == [f"{arm} begun" for arm in ended if arm != "dies"]
    assert "--- ok 3 yes\n" in (tmp_path / "logs" / "worker-00.log").read_text()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("fault", [OSError("the disk is full"), KeyboardInterrupt()])
def test_a_fault_of_ours_or_an_interruption_ends_the_workers(fault: BaseException, tmp_path: Path) -> None:
    rows: list[str] = []

    def broken(job: CompareJob, row: dict[str, Any]) -> None:
        rows.append(job.arm)
        raise fault

    with pytest.raises(type(fault)):
        make_all(map(job, ("ok", "hangs", "ok 2")), workers(tmp_path, 2), broken)
    assert rows == ["ok"]  # what was cut off is no failure
    assert multiprocessing.active_children() == []


def test_a_worker_answers_every_run_and_ends_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ours, theirs), bases, threads = Pipe(), list[Any](), list[int]()

    def measure(job: Any, known: Any, weights: Any, unfinished: Path, on_note: Any) -> dict[str, Any]:
        assert unfinished == tmp_path / "unfinished" / job.key
        assert (weights, os.environ["OWN"]) == (tmp_path / "weights" / f"{Path(job.file).stem}-0", "yes")
        bases.append(known)
        on_note("a note")
        if job.arm == "b":
            raise RuntimeError("it broke")
        return {"key": job.key}

    monkeypatch.setenv("OWN", "no")
    monkeypatch.setattr("sage_grpo.tools.compare.measure.measure", measure)
    monkeypatch.setattr(worker.os, "setsid", lambda: None)
    monkeypatch.setattr(worker.os, "dup2", lambda *files: None)
    monkeypatch.setattr(worker.threading, "Thread", lambda **named: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for arm in "ab":
        ours.send(job(arm))
    worker.serve(theirs, tmp_path / "log", {"OWN": "yes"}, tmp_path, True)
    *messages, end = (ours.recv() for _ in range(4))
    assert messages == [{"note": "a note"}, {"row": {"key": "a/0"}}, {"note": "a note"}]
    assert (end["row"]["status"], end["row"]["error"]) == ("failed", "RuntimeError: it broke")
    assert bases[0] is bases[1]  # runs share evaluations of untrained models
    assert threads == [1]


def test_a_worker_ends_with_its_parent() -> None:
    code = (
        "import multiprocessing, time, fake_worker\n"
        "process = multiprocessing.get_context('spawn').Process(target=fake_worker.outlive)\n"
        "process.start(); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parent) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the child's end of the pipe is closed, too


def test_a_process_sets_its_environment_before_torch_is_imported() -> None:
    code = "import sys, sage_grpo.tools.compare.worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe("shapes/sage")
    large = replace(small, model=replace(small.model, path="somewhere/large"))
    monkeypatch.setattr(comparison, "cores", lambda: 40)
    assert comparison.how_many([small], []) == 40
    assert comparison.how_many([small], ["0", "1"]) == 32
    assert comparison.how_many([small, large], ["0", "1"]) == 2
    assert comparison.how_many([small], list(map(str, range(50)))) == 50  # a core for each GPU at least
    places = [comparison.environment(["0", "1"], number)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert places == ["0", "1", "0"]
    own = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    assert comparison.environment([], 0).items() >= own.items()
