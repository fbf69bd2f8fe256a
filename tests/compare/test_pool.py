"""Workers side by side: faults are recorded and others go on, a budget holds, nothing is left running."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_grpo.tools.compare import pool as module
from sage_grpo.tools.compare import worker
from sage_grpo.tools.compare.pool import RunPool, UnderWay
from sage_grpo.tools.compare.prepare import CompareJob
from sage_grpo.tools.compare.worker import RunRequest, Worker
from sage_grpo.training.config import TrainConfig

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


def job(arm: str, seed: int = 0) -> CompareJob:
    given = {"recipe": "r", "settings": {}, "points": (), "kind": "train"}
    return CompareJob(arm=arm, seed=seed, key=f"{arm}/{seed}", config=TrainConfig(iterations=2), **given)


def request(job: CompareJob) -> RunRequest:
    return RunRequest(job=job, weights=None, unfinished=Path("kept"))


def work(folder: Path, jobs: list[CompareJob], look: Any = lambda pool: None) -> tuple[RunPool, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    pool = RunPool(jobs, [Worker(folder, 0, {"OWN": "yes"}, COMMAND)], lambda job, row: rows.append(row), request)
    pool.run(look, interval=0.02)
    return pool, rows


def test_a_worker_makes_run_after_run_until_one_fails(monkeypatch, capfd) -> None:
    waiting, sent = [request(job("fails")), request(job("ok"))], []

    def measure(one: CompareJob, bases: Any, tick: Any, *more: Any) -> int:
        tick(1)
        return 7 // (one.arm == "ok")

    line = SimpleNamespace(send=sent.append, recv=waiting.pop)
    monkeypatch.setattr(worker, "_end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "Connection", lambda descriptor: nullcontext(line))
    monkeypatch.setattr("sage_grpo.tools.compare.measure.measure", measure)
    with warnings.catch_warnings():
        assert worker.main(3) == 1
    assert sent[:3] == [{"done": 1}, {"row": 7}, {"done": 1}]
    assert (sent[3]["row"]["status"], sent[3]["row"]["error"][:17]) == ("failed", "ZeroDivisionError")
    headings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("---")]
    assert headings == [f"--- {job(arm).name}" for arm in ("ok", "fails")]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []

    def start(*words: Any, **named: Any) -> Any:
        started.append(Popen(*words, **named))
        return started[-1]

    Popen = subprocess.Popen
    monkeypatch.setattr(worker.subprocess, "Popen", start)
    return started


def test_a_run_that_fails_or_takes_its_process_along_is_recorded_and_the_others_go_on(
    tmp_path: Path, processes: list[Any]
) -> None:
    pool, rows = work(tmp_path, [job("ok 0"), job("ok 1"), job("fails"), job("ok 2"), job("dies"), job("ok 3")])
    ended = {"ok 0": "done", "ok 1": "done", "fails": "failed", "ok 2": "done", "dies": "failed", "ok 3": "done"}
    assert [(row["arm"], row["status"]) for row in rows] == list(ended.items())
    assert not pool.waiting
    first, second, broken, after, died, _ = rows
    assert first["pid"] == second["pid"] == broken["pid"] != after["pid"]  # one process makes many
    assert broken["error"] == "it broke"
    assert "ended with 9" in died["error"]
    assert "worker-00.log" in died["error"]
    assert died["key"] == "dies/0"
    assert "--- ok 3 yes\n" in (tmp_path / "logs" / "worker-00.log").read_text()
    assert len(processes) == 3
    assert all(process.returncode is not None for process in processes)


def test_at_the_end_of_the_budget_nothing_runs_and_what_was_cut_off_is_no_failure(
    tmp_path: Path, processes: list[Any]
) -> None:
    def look(pool: RunPool) -> None:
        if pool.running and pool.running[0].job.arm == "hangs" and pool.running[0].heard:
            pool.budget = 0.0

    pool, rows = work(tmp_path, [job("ok"), job("hangs"), job("ok 2")], look)
    assert [row["arm"] for row in rows] == ["ok"]
    assert [one.arm for one in pool.waiting] == ["hangs", "ok 2"]
    assert [process.returncode for process in processes] == [-9]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def pool_of(*jobs: CompareJob, workers: int = 0, **options: Any) -> RunPool:
    return RunPool(jobs, [None] * workers, lambda job, row: None, request, **options)  # type: ignore[list-item]


def begin(pool: RunPool) -> tuple[UnderWay, Any]:
    """Take the next job; returns it with the end of its worker's connection."""
    taken = pool._take()
    assert taken is not None
    start, said = pool.kept.get(taken.key, 0), list[dict[str, Any]]()
    worker: Any = SimpleNamespace(receive=lambda: said.pop(0))
    pool.running.append(UnderWay(taken, worker, worker, module.time.monotonic(), start, start))

    def hear(**message: Any) -> None:
        said.append(message)
        pool._hear(pool.running[0])

    return pool.running[0], hear


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("known", "waiting", "budget", "taken"),
    [
        ({"long": 500, "short": 5}, "long short", 100, "short"),
        ({"long": 500}, "long", 100, None),
        ({"a": 5}, "a", 10, "a"),  # in the last moment
        ({"a": 5}, "a", 9.9, None),
        ({"quick": 1, "slow": 60}, "new", 100, None),  # of unknown pace: only where the slowest would have time, not the mean of 61
        ({"slow": 500}, "new", 120, "new"),  # runs are kept every minute: room for all of it would leave a GPU idle
        ({"slow": 500}, "new", 119, None),
        ({}, "new", 0, "new"),
        ({"slow": 500}, "slow", None, "slow"),
    ],
)  # fmt: skip
def test_a_run_is_begun_where_something_of_it_will_be_kept_in_time(
    known: dict[str, float], waiting: str, budget: float | None, taken: str | None
) -> None:
    pool = pool_of(*map(job, waiting.split()), budget=budget)
    for arm, seconds in known.items():
        pool.estimates.learn(job(arm), 2 * seconds, 2)
    found = pool._take()
    assert (found and found.arm) == taken


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("kept", "budget", "begun"), [({}, 40, True), ({}, 30, False), (7, 10, True), (8, 30, False)])
def test_a_run_that_gets_to_its_next_point_in_time_is_started_from_where_it_was_kept(kept, budget, begun) -> None:
    """Ten seconds an iteration, points every four: what is done until a point is not lost. Kept after 7 there is one before the next."""
    long = replace(job("long"), config=TrainConfig(iterations=12), points=(0, 4, 8, 12))
    pool = pool_of(long, kept={long.key: kept} if kept else {}, budget=budget)
    pool.estimates.learn(long, 100, 10)
    assert (pool._take() is not None) == begun


def test_the_start_of_a_run_is_no_part_of_its_pace(clock) -> None:
    """An import of 40 s, and two seconds an iteration: 16 s are left of ten iterations, not 420."""
    one = replace(job("a"), config=TrainConfig(iterations=10))
    pool = pool_of(one, workers=1)
    _, hear = begin(pool)
    clock[0] = 40.0
    hear(done=1)
    assert pool.left() is None  # one report is no pace yet
    clock[0] = 42.0
    hear(done=2)
    assert pool.left() == pytest.approx(16)
    hear(row={"status": "done"})
    assert pool.estimates.seconds(one, 10) == pytest.approx(42)  # a whole run has its start
    pool.estimates.learn(one, 1000.0, 1, under_way=True)
    assert pool.estimates.seconds(one, 10) == pytest.approx(42)  # and knows better than one under way
    pool.estimates.learn(one, 5, 0)  # of no iteration there is no pace
    pool.estimates.learn(replace(one, settings={"lr": 1}), 90, 1)  # of a suite whose arm has the same name
    assert pool.estimates.seconds(replace(one, seed=3), 10) == pytest.approx(42)
    continued = pool_of(one, workers=1, kept={one.key: 6})
    _, hear = begin(continued)
    clock[0] += 12.0
    hear(row={"status": "done"})
    assert continued.estimates.seconds(one, 10) == pytest.approx(30)  # of the rest


def test_a_fault_of_ours_ends_the_workers(tmp_path: Path, processes: list[Any]) -> None:
    def broken(job: CompareJob, row: dict[str, Any]) -> None:
        raise OSError("the disk is full")

    workers = [Worker(tmp_path, n, {}, COMMAND) for n in range(2)]
    with pytest.raises(OSError, match="disk is full"):
        RunPool([job("ok"), job("hangs")], workers, broken, request).run(interval=0.02)
    assert len(processes) == 2
    assert processes[1].returncode == -9
    assert processes[0].returncode is not None


def test_a_worker_answers_every_run_and_ends_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours, theirs), bases, threads = Pipe(), list[Any](), list[int]()

    def measure(job: Any, known: Any, progress: Any, weights: Any, unfinished: Path, tell: Any) -> dict[str, Any]:
        assert (weights, unfinished) == (None, Path("kept"))
        bases.append(known)
        progress(1)
        tell("a note")
        if job.arm == "b":
            raise RuntimeError("it broke")
        return {"key": job.key}

    monkeypatch.setattr("sage_grpo.tools.compare.measure.measure", measure)
    monkeypatch.setattr(worker, "Connection", lambda descriptor: {7: theirs}[descriptor])
    monkeypatch.setattr(worker.threading, "Thread", lambda **named: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for arm in "ab":
        ours.send(request(job(arm)))
    assert worker.main(7) == 1
    *messages, end = (ours.recv() for _ in range(6))
    begun: list[dict[str, Any]] = [{"done": 1}, {"note": "a note"}]
    assert messages == [*begun, {"row": {"key": "a/0"}}, *begun]
    assert (end["row"]["status"], end["row"]["error"]) == ("failed", "RuntimeError: it broke")
    assert bases[0] is bases[1]  # runs share evaluations of untrained models
    assert threads == [1]
    monkeypatch.setattr(sys, "argv", ["worker", "-1"])
    with pytest.raises(ValueError, match="invalid handle"):  # it is a program, too
        runpy.run_path(str(worker.__file__), run_name="__main__")


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; process = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, stdout=1); time.sleep(60)"
    child = (
        "import threading, time; from sage_grpo.tools.compare.worker import _end_with_parent; "
        "threading.Thread(target=_end_with_parent, daemon=True).start(); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the child's end of the pipe is closed, too
