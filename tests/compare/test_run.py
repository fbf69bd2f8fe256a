"""Several suites in one call, some arms of a suite, and what a call does with runs that were cut off: all but the computing."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from sage_grpo.cli.main import main
from sage_grpo.run.identity import of_code
from sage_grpo.tools.compare import machine, store, suite_file, worker
from sage_grpo.tools.compare import run as lab
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.tools.compare.worker import read
from sage_grpo.training.config import TrainConfig


class Here:
    """A worker without a process or a model: what it scores is its key. It keeps an account of what it was asked for."""

    asked: list[str]
    fails: Callable[[CompareJob], bool]

    def __init__(self, folder: Path, number: int, environment: Mapping[str, str]) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def ready(self) -> bool:
        return True

    def answer(self, line: str) -> Iterator[dict[str, Any]]:
        words = json.loads(line)
        weights, _, _ = (words.pop(name) for name in ("weights", "unfinished", "file"))
        job = CompareJob(**{**words, "config": TrainConfig(iterations=1)})
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

    def close(self, *, now: bool) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    """Runs are made by `Here`."""
    Here.asked, Here.fails = [], staticmethod(lambda job: False)  # type: ignore[assignment]
    monkeypatch.setattr(machine, "Process", Here)
    return Here


def jobs_of(suite: Suite) -> list[CompareJob]:
    """Its runs, by hand: the key goes by settings and seed."""
    kinds = {"plain": "a", "same": "a", "b": "b", "fast": "c"}
    given = {"recipe": "shapes/sage", "settings": {}, "points": (1,), "kind": "train"}
    config = TrainConfig(iterations=1)
    named = [(arm.name, seed) for seed in suite.seeds for arm in suite.arms]
    return [CompareJob(arm=arm, seed=seed, key=f"{kinds[arm]}{seed}", config=config, **given) for arm, seed in named]


@dataclass
class Engine:
    """Workers of `Here`."""

    asked: list[tuple[int, Path, int | None]] = field(default_factory=list)

    @contextmanager
    def open(self, configs: Sequence[TrainConfig], out: Path, most: int | None) -> Iterator[tuple[list[Here], str]]:
        """One."""
        self.asked.append((len(configs), out, most))
        yield [Here(out, 0, {})], "the moon."


@pytest.fixture
def suites_of_two() -> dict[str, Suite]:
    """Suites `one` and `other` with a run in common per seed, under different names."""
    plain, same = (Arm(name=name, recipe="shapes/sage") for name in ("plain", "same"))
    b, fast = Arm(name="b", recipe="shapes/branch"), replace(same, name="fast", options={"optimizer.lr": 2e-3})
    given = {"title": "", "question": "", "seeds": (1, 2), "iterations": 1, "figures": ()}
    one = Suite(name="one", arms=(plain, b), baseline="plain", **given)
    return {"one": one, "other": Suite(name="other", arms=(same, fast), baseline="same", **given)}


def call(two: Mapping[str, Suite], folders: Mapping[str, Path], *, arms: Any = None, **more: Any) -> lab.CompareEnded:
    """A call for the suites of these folders."""
    suites = [(two[name], folder) for name, folder in folders.items()]
    parts = [lab.SuiteRun(folder=folder, suite=one, jobs=jobs_of(one), arms=arms) for one, folder in suites]
    given = {"engine": Engine(), "side_by_side": 1, **more}
    return lab.run(parts, out=parts[0].folder, command="the command", **given)


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
    engine, folders = Engine(), {"one": tmp_path}
    ended = call(suites_of_two, folders, arms=["b"], engine=engine, side_by_side=3)
    assert ended == lab.CompareEnded(finished=2, failed=0, missing=0)
    assert engine.asked == [(2, tmp_path, 3)]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "2 runs to make, 1 side by side on the moon.",
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


def test_several_suites_share_runs_from_the_command_to_their_tables(
    here: type[Here], suites_of_two: dict[str, Suite], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(suite_file, "load", lambda file, size: suites_of_two[file.stem])
    both = tmp_path / "both"
    words = ["--suite", "one.yaml,x/other.yaml", "--out", str(both), "--weights", "--jobs", "1"]
    assert (main(["compare", *words]), len(here.asked), len(set(here.asked))) == (0, 6, 6)  # and not 8
    told = capsys.readouterr()
    assert "6/6" in told.err
    assert sorted(path.name for path in both.iterdir()) == ["logs", "one", "other"]
    assert (both / "other" / "table.md").read_text().strip() in told.out


def test_what_is_told_of_the_runs_of_several_suites(suites_of_two: dict[str, Suite], capsys) -> None:
    jobs = {job.key: job for job in jobs_of(suites_of_two["one"])}
    made = {"a1": {"code": "0.0/other"}, "x": {}, "b1": {"code": of_code()}}
    one = SimpleNamespace(asked=jobs, done=made, suite=suites_of_two["one"])
    teller = lab.CompareProgress()
    teller.look_back([one, SimpleNamespace(asked={"c1": None}, done={})])  # type: ignore[list-item]
    pool = SimpleNamespace(running={"a2": None, "b2": None}, left=lambda: 120.0)
    task = teller._bar.tasks[0]
    assert teller._bar.disable  # nobody looks
    with teller.watching():
        assert (task.completed, task.total, task.fields["note"]) == (2, 5, "")
    row = {"status": "done", "error": None, "iterations": 3, "evaluations": {"2": {}, "3": {"total": 0.125}}}
    teller.ended(one, jobs["a2"], row, pool)  # type: ignore[arg-type]
    teller.look(pool)  # type: ignore[arg-type]
    assert (task.completed, task.fields["note"]) == (3, "2 under way, 2 min left")
    teller.ended(one, jobs["b2"], {**row, "status": "diverged", "error": "why", "evaluations": {}}, pool)  # type: ignore[arg-type]
    teller.note(jobs["b2"], "goes on")
    first, warned, *told = capsys.readouterr().err.splitlines()
    assert first == "2 of 5 runs are there already."
    assert "made by other code (0.0/other...)" in warned
    assert told == [
        "3/5  one: plain, seed 2: Overall 0.1250  (2 min left)",
        "4/5  one: b, seed 2: diverged: why  (2 min left)",
        "b, seed 2: goes on",
    ]


class Stdin:
    """Two jobs, and the end when it is time."""

    def __init__(self) -> None:
        self.time = threading.Event()

    def __enter__(self) -> Iterator[bytes]:
        return chain([b"one\n", b"two\n"], (line for line in self if line))

    def __exit__(self, *words: object) -> None: ...

    def __iter__(self) -> Iterator[bytes]:
        assert self.time.wait(60)
        yield b""


@pytest.mark.parametrize("answered", [1, 2])
def test_a_worker_ends_at_once_where_stdin_ends_before_its_answer(answered, monkeypatch) -> None:
    stdin, exits, codes = Stdin(), SimpleQueue[int](), list[int]()

    class Queue(SimpleQueue):  # type: ignore[type-arg]
        asked = 0

        def get(self, *words: Any) -> Any:
            self.asked += 1
            if self.asked > 2:  # the answer to the second is there
                stdin.time.set()
            return super().get(*words)

    monkeypatch.setattr(worker, "SimpleQueue", Queue)
    monkeypatch.setattr(worker, "open", lambda *words, **more: {(0, "rb"): stdin}[words], raising=False)
    monkeypatch.setattr(worker.os, "_exit", exits.put)
    lines = worker.jobs()
    assert [next(lines), next(lines)] == ["one\n", "two\n"]
    if answered == 1:
        stdin.time.set()
        codes.append(exits.get(timeout=60))
    assert list(lines) == []
    assert codes == [1] * (answered == 1)
    assert exits.empty()


def test_a_request_says_where_a_run_is_kept(suites_of_two: dict[str, Suite], tmp_path: Path) -> None:
    job = replace(jobs_of(suites_of_two["one"])[3], arm="b at [1, 2]")
    job = replace(job, config=replace(job.config, seed=job.seed))
    assert (job.name, job.file) == ("b at [1, 2], seed 2", "b-at-1-2--b2.yaml")
    lab.write_config(job, tmp_path)
    assert read(json.dumps(lab.request(job, tmp_path, weights=False))) == (job, None, store.place(tmp_path, job.key))
    line = lab.request(job, tmp_path, weights=True)
    assert (line["weights"], line["file"]) == (f"{tmp_path}/weights/b-at-1-2--b2-2", f"{tmp_path}/configs/{job.file}")


@pytest.mark.parametrize(("fails", "code"), [(None, 0), (RuntimeError("it broke"), 1), (BrokenPipeError(), 1)])
def test_a_worker_says_how_far_it_is_and_what_came_of_a_run(
    fails: Exception | None, code: int, suites_of_two: dict[str, Suite], tmp_path: Path, monkeypatch, capsys
) -> None:
    job, *_ = jobs_of(suites_of_two["one"])
    reading, writing = os.pipe()
    done_once: list[Any] = []

    def measure(
        found: CompareJob, bases: Any, progress: Any, weights: Any, unfinished: Path, tell: Any
    ) -> dict[str, Any]:
        assert (found, bases, weights, unfinished) == (job, {}, None, store.place(tmp_path, job.key))
        progress(1)
        tell("a note")
        if fails is not None:
            raise fails
        return {"key": found.key}

    monkeypatch.setattr("sage_grpo.tools.compare.measure.measure", measure)
    monkeypatch.setattr(worker, "jobs", lambda: ["a line"])
    monkeypatch.setattr(worker, "read", lambda line: (job, None, store.place(tmp_path, job.key)))
    monkeypatch.setattr(worker.os, "dup", lambda number: writing)
    monkeypatch.setattr(worker.os, "dup2", lambda *numbers: done_once.append(numbers))
    monkeypatch.setattr("torch.set_num_threads", done_once.append)
    with warnings.catch_warnings():
        assert worker.main() == code
    assert capsys.readouterr().err.startswith("--- plain, seed 1\n")
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
