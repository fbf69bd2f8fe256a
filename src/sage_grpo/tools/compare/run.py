"""Comparisons from start to end: one pool of workers makes the missing runs, and rows are written as they come."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sage_grpo.run.identity import of_code, plain
from sage_grpo.run.lock import FolderLock
from sage_grpo.tools.compare import machine, store
from sage_grpo.tools.compare.design import Suite
from sage_grpo.tools.compare.pool import RunPool
from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.tools.compare.worker import RunRequest
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import fixed, minutes

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompareEnded:
    """The outcome of a call; a run that several suites share counts once."""

    finished: int
    """Runs that are done or diverged, in this call or before."""
    failed: int
    missing: int
    """Runs that were not made, for lack of time."""


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One suite of a call."""

    folder: Path
    suite: Suite
    jobs: Sequence[CompareJob]
    """All its runs."""
    arms: Collection[str] | None = None
    """Arms whose runs are made; None is all."""


class SuiteFolder:
    """The folder of a suite: its rows, and its missing runs."""

    def __init__(self, part: SuiteRun, command: str, say: Callable[[str], None]) -> None:
        self.folder, self.suite, self.rows = part.folder, part.suite, part.folder / store.ROWS
        if store.repair(self.rows):
            say(f"The last line of {self.rows} was cut off and is removed; its run is made again.")
        keys = [job.key for job in part.jobs]
        rows = store.latest(store.read_rows(self.rows), keys)
        self.done = {key: row for key, row in rows.items() if row["status"] in store.FINISHED}
        self.asked = {job.key: job for job in part.jobs if part.arms is None or job.arm in part.arms}
        store.save_suite(self.folder, self.suite, keys, command)
        for key in store.kept(self.folder, self.done):  # stopped between the two
            store.forget(self.folder, key)
        for job in self.missing.values():  # as `sage-grpo train --config` takes it
            config = yaml.safe_dump(plain(asdict(job.config)), sort_keys=False)
            replace_text(self.folder / "configs" / job.file, config)

    @property
    def missing(self) -> dict[str, CompareJob]:
        return {key: job for key, job in self.asked.items() if key not in self.done}

    def weights_of(self, job: CompareJob) -> Path:
        return self.folder.absolute() / "weights" / f"{Path(job.file).stem}-{job.seed}"

    def request(self, job: CompareJob, *, weights: bool) -> RunRequest:
        unfinished = store.place(self.folder.absolute(), job.key)
        return RunRequest(job=job, weights=self.weights_of(job) if weights else None, unfinished=unfinished)

    def write(self, row: Row, weights: Path | None = None) -> None:
        """Write the row of a run that was made here or for another suite, under its name here; with its weights."""
        job = self.missing[row["key"]]
        if weights is not None and weights != self.weights_of(job):
            shutil.copytree(weights, self.weights_of(job), dirs_exist_ok=True)
        row = row | head(job, row["status"], row["error"]) | {"suite": self.suite.name}
        store.append(self.rows, {"suite": self.suite.name} | row)
        if row["status"] in store.FINISHED:
            self.done[job.key] = row
            store.forget(self.folder, job.key)


def run(
    parts: Sequence[SuiteRun],
    *,
    out: Path,
    command: str,
    side_by_side: int | None = None,
    budget: float | None = None,
    weights: bool = False,
) -> CompareEnded:
    """Make the missing runs of the folders; the workers' logs go to `out`."""
    began = time.monotonic()
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(FolderLock(part.folder))
        stack.enter_context(_stoppable())
        progress = CompareProgress()
        folders = [SuiteFolder(part, command, progress.say) for part in parts]
        _share(folders)
        progress.look_back(folders)
        missing, homes, kept = _missing(folders)
        failed: set[str] = set()

        def keep(job: CompareJob, row: Row) -> None:
            made = homes[job.key].weights_of(job) if weights and row["status"] == "done" else None
            for folder in [folder for folder in folders if job.key in folder.missing]:
                folder.write(row, made)
            if row["status"] == "failed":
                failed.add(job.key)
            progress.ended(homes[job.key], job, row, pool)

        if missing:
            opened = machine.opened([job.config for job in missing], out, side_by_side)
            workers, where = stack.enter_context(opened)
            progress.say(f"{len(missing)} runs to make, {len(workers)} side by side on {where}")
            pool = RunPool(
                missing,
                workers,
                keep,
                lambda job: homes[job.key].request(job, weights=weights),
                on_note=lambda job, text: progress.say(f"{job.name}: {text}"),
                kept=kept,
                budget=None if budget is None else budget - (time.monotonic() - began),
            )
            with progress.watching():
                pool.run(progress.look)
        asked = {key for folder in folders for key in folder.asked}
        done = asked & {key for folder in folders for key in folder.done}
        return CompareEnded(finished=len(done), failed=len(failed), missing=len(asked - done - failed))


def _share(folders: Sequence[SuiteFolder]) -> None:
    """Copy rows that one suite already has to the others."""
    known = {key: row for folder in folders for key, row in folder.done.items()}
    for folder in folders:
        for key in [key for key in folder.missing if key in known]:
            folder.write(known[key])


def _missing(folders: Sequence[SuiteFolder]) -> tuple[list[CompareJob], dict[str, SuiteFolder], dict[str, int]]:
    """The runs to make, suite by suite, interrupted ones first; the folder in which each is kept; and their last saved iterations."""
    jobs: dict[str, CompareJob] = {}
    homes: dict[str, SuiteFolder] = {}
    kept: dict[str, int] = {}
    for folder in folders:
        for key, number in store.kept(folder.folder, folder.missing).items():
            kept[key] = number
            homes[key] = folder
    for folder in folders:
        for job in sorted(folder.missing.values(), key=lambda job: job.key not in kept):
            homes.setdefault(job.key, folder)
            jobs.setdefault(job.key, homes[job.key].asked[job.key])
    return list(jobs.values()), homes, kept


class CompareProgress:
    """Prints the progress of a call: a bar in a terminal, else a line per run."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, stderr=True)
        self.total = self._done = 0
        self._many = False
        self._bar = Progress(
            TextColumn("runs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, note="")

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def look_back(self, folders: Sequence[SuiteFolder]) -> None:
        """Print the number of existing runs; warn where other code made them."""
        asked = {key for folder in folders for key in folder.asked}
        rows = {key: row for folder in folders for key, row in folder.done.items() if key in asked}
        self.total, self._done, self._many = len(asked), len(rows), len(folders) > 1
        code = of_code()
        others = sorted({row["code"][:24] for row in rows.values() if row.get("code") and row["code"] != code})
        if rows:
            self.say(f"{len(rows)} of {self.total} runs are there already.")
        if others:
            self.say(
                f"Warning: some of them were made by other code ({', '.join(others)}...). Choose another --out to make all of them anew."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._bar.update(self._task, completed=self._done, total=self.total)
        with self._bar:
            yield

    def ended(self, folder: SuiteFolder, job: CompareJob, row: Mapping[str, Any], pool: RunPool) -> None:
        self._done += 1
        column = folder.suite.columns[0]
        last = row["evaluations"].get(str(row["iterations"]), {}).get(column.key)
        result = row["status"] if last is None else f"{column.title} {fixed(last, 4)}"
        fault = f": {row['error']}" if row["error"] else ""
        name = f"{folder.suite.name}: {job.name}" if self._many else job.name
        self.say(f"{self._done}/{self.total}  {name}: {result}{fault}  ({minutes(pool.left())} left)")

    def look(self, pool: RunPool) -> None:
        note = f"{len(pool.running)} under way, {minutes(pool.left())} left"
        self._bar.update(self._task, completed=self._done, note=note)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a comparison as Ctrl-C does: workers end, rows stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        sys.stderr.flush()
