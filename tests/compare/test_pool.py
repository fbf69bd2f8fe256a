"""Workers side by side: faults are recorded and others go on, a budget holds, nothing is left running."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.tools.compare import pool as module
from sage_grpo.tools.compare.engine import PlaceLost, Process
from sage_grpo.tools.compare.pool import LOSSES, RunPool
from sage_grpo.tools.compare.prepare import CompareJob
from sage_grpo.tools.compare.worker import request
from sage_grpo.training.config import TrainConfig

FAKE = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    print("---", job["arm"], os.getpid(), file=sys.stderr, flush=True)
    what = job["arm"].split()[0]
    if what == "dies":
        os._exit(9)
    if what == "hangs":
        print(json.dumps({"done": 1}), flush=True)
        time.sleep(1000)
    row = {"arm": job["arm"], "seed": job["seed"], "key": job["key"], "status": "done", "iterations": 2, "error": None, "evaluations": {}, "pid": os.getpid()}
    if what == "fails":
        row |= {"status": "failed", "error": "it broke"}
    print(json.dumps({"done": 2}), flush=True)
    print(json.dumps({"row": row}), flush=True)
    if what == "fails":
        time.sleep(0.1)  # as long as it takes to leave
        sys.exit(1)
"""
"""A worker's side of the conversation, without the libraries; the arm's name says what it does."""


def job(arm: str, seed: int = 0) -> CompareJob:
    given = {"recipe": "r", "settings": {}, "points": (), "kind": "train"}
    return CompareJob(arm=arm, seed=seed, key=f"{arm}/{seed}", config=TrainConfig(iterations=2), **given)


def asked(job: CompareJob) -> dict[str, Any]:
    return request(job, Path(), weights=False)


def work(folder: Path, jobs: list[CompareJob], **options: Any) -> tuple[RunPool, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    workers = [Process(folder, 0, {}, (sys.executable, "-c", FAKE))]
    pool = RunPool(jobs, workers, lambda job, row: rows.append(row), asked)
    pool.run(**options, interval=0.02)
    return pool, rows


def test_a_run_that_fails_or_takes_its_process_along_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
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


def test_at_the_end_of_the_budget_nothing_runs_and_what_was_cut_off_is_no_failure(tmp_path: Path) -> None:
    """Which is when the second run is under way."""

    def look(pool: RunPool) -> None:
        if "hangs/0" in pool._heard:
            pool.budget = 0.0

    pool, rows = work(tmp_path, [job("ok"), job("hangs"), job("ok 2")], look=look)
    assert [row["arm"] for row in rows] == ["ok"]
    assert [one.arm for one in pool.waiting] == ["hangs", "ok 2"]
    assert pool.workers[0]._process is not None
    assert pool.workers[0]._process.poll() is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for a pool, in seconds."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def pool_of(*jobs: CompareJob, workers: int = 0, **options: Any) -> RunPool:
    return RunPool(jobs, [None] * workers, lambda job, row: None, asked, **options)  # type: ignore[list-item]


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
    """Two iterations a run; what is known are seconds of one."""
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


def test_time_left_is_the_work_over_the_workers_and_no_less_than_the_longest_run(clock) -> None:
    pool = pool_of(job("a", 1), job("a", 2), job("b", 1), workers=2, kept={"a/1": 1})
    assert pool.left() is None
    pool.estimates.learn(job("a"), 10, 2)  # b is not known yet and counts as the others do
    assert pool.left() == (5 + 10 + 10) / 2
    pool.estimates.learn(job("c"), 20, 2)
    assert pool.left() == (5 + 10 + 15) / 2
    pool._take()
    pool._hear(job("a", 1), {"done": 0})  # it was not continued after all
    assert pool.left() == (10 + 10 + 15) / 2
    wide = pool_of(job("a", 1), job("c", 1), workers=9)
    wide.estimates = pool.estimates
    assert wide.left() == 20


def test_the_start_of_a_run_is_no_part_of_its_pace(clock) -> None:
    """An import of 40 s, and one iteration a second: 8 s are left of ten iterations, not 400."""
    one = replace(job("a"), config=TrainConfig(iterations=10))
    pool = pool_of(one, workers=1)
    pool._take()
    clock[0] = 40.0
    pool._hear(one, {"done": 1})
    assert pool.left() is None  # one report is no pace yet
    clock[0] = 41.0
    pool._hear(one, {"done": 2})
    assert pool.left() == pytest.approx(8)
    pool._end(one, {"status": "done"})
    assert pool.estimates.seconds(one, 10) == pytest.approx(41)  # a whole run has its start
    pool.estimates.guess(one, 1000.0, 1)
    assert pool.estimates.seconds(one, 10) == pytest.approx(41)  # and knows better than one under way
    pool.estimates.learn(one, 5, 0)  # of no iteration there is no pace
    pool.estimates.learn(replace(one, settings={"lr": 1}), 90, 1)  # of a suite whose arm has the same name
    assert pool.estimates.seconds(replace(one, seed=3), 10) == pytest.approx(41)
    continued = pool_of(one, workers=1, kept={one.key: 6})
    continued._take()
    clock[0] += 12.0
    continued._end(one, {"status": "done"})
    assert continued.estimates.seconds(one, 10) == pytest.approx(30)  # of the rest


class Elsewhere:
    """A worker without a process on a cluster with so many rooms: it loses its place, and the cluster that room, in runs that `loses` names."""

    def __init__(self, rooms: threading.Semaphore, loses: dict[str, int]) -> None:
        self.rooms, self.loses, self.has_room, self.closed = rooms, loses, False, False
        self.before_loss = lambda: None

    def ready(self) -> bool:
        """Wait for room."""
        while not (self.has_room or self.closed):
            self.has_room = self.rooms.acquire(timeout=0.01)
        return not self.closed

    def answer(self, line: str) -> Iterator[dict[str, Any]]:
        """A row, or a loss."""
        arm = json.loads(line)["arm"]
        yield {"done": 1}
        if self.loses.get(arm, 0) > 0:
            self.loses[arm] -= 1
            self.before_loss()
            self.has_room = False
            raise PlaceLost("Its node was lost.")
        yield {"row": {"arm": arm, "status": "done", "error": None}}

    def close(self, *, now: bool) -> None:
        """Wait no more; the room is free."""
        assert not now, "nothing is under way that could be ended"
        self.closed = True
        if self.has_room:
            self.has_room = False
            self.rooms.release()


@pytest.mark.parametrize("losses", [LOSSES - 1, LOSSES])
def test_a_run_that_loses_its_place_is_made_again_before_others_and_fails_when_it_loses_every_one(losses: int) -> None:
    rows, notes, one = list[Any](), list[str](), Elsewhere(threading.Semaphore(9), {"a": losses})
    said = {"on_note": lambda job, text: notes.append(text)}
    RunPool([job("a"), job("b")], [one], lambda job, row: rows.append(row), asked, **said).run(interval=0.01)
    assert [row["arm"] for row in rows] == ["a", "b"]
    assert [row["status"] for row in rows] == ["done" if losses < LOSSES else "failed", "done"]
    assert notes == ["Its node was lost. It is made again."] * (LOSSES - 1)
    assert ("may be the reason" in str(rows[0]["error"])) == (losses == LOSSES)


@pytest.mark.parametrize("late", [False, True])
def test_what_one_lost_another_makes_or_gives_its_room_for_and_nobody_waits_for_a_worker_without_one(
    late: bool,
) -> None:
    """Two rooms, of which one is lost, in the middle of the work or when the other worker has nothing more to do."""
    rooms, loses, rows = threading.Semaphore(2), {"lost": 1}, list[str]()
    workers = [Elsewhere(rooms, loses) for _ in range(2)]
    for one, other in (workers, reversed(workers)):
        one.before_loss = lambda other=other: _until(lambda: other.closed) if late else None  # type: ignore[misc]
    jobs = [job("lost"), *(job(f"ok {n}") for n in range(3))]
    RunPool(jobs, workers, lambda job, row: rows.append(row["arm"]), asked).run(interval=0.01)
    assert sorted(rows) == ["lost", "ok 0", "ok 1", "ok 2"]


def _until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not so():
        assert time.monotonic() < end, "it has nothing more to do, and holds its room"
        time.sleep(0.005)


def test_a_process_that_is_started_after_the_end_is_ended(tmp_path: Path) -> None:
    one = Process(tmp_path, 7, {"OWN": "yes"}, (sys.executable, "-c", "import os; print(os.environ['OWN']); input()"))
    process = one.start()
    assert one.start() is process
    assert process.stdout is not None
    assert process.stdout.readline() == "yes\n"
    one.close(now=False)
    assert process.returncode == 1  # of the end of its stdin
    assert one.start().wait() == -9
    assert (tmp_path / "logs" / "worker-07.log").read_text().count("EOFError") >= 1


def test_a_fault_of_ours_ends_the_workers(tmp_path: Path) -> None:
    def broken(job: CompareJob, row: dict[str, Any]) -> None:
        raise OSError("the disk is full")

    workers = [Process(tmp_path, n, {}, (sys.executable, "-c", FAKE)) for n in range(2)]
    pool = RunPool([job("ok"), job("hangs")], workers, broken, asked)
    with pytest.raises(OSError, match="disk is full"):
        pool.run(interval=0.02)
    assert all(worker._process is None or worker._process.poll() is not None for worker in workers)
