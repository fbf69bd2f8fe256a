"""A comparison from start to end: what is missing is run, rows are written as they come, then tables and figures."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sage_grpo.lab import machine, store
from sage_grpo.lab.design import Suite
from sage_grpo.lab.pool import Pool, Worker
from sage_grpo.lab.prepare import Job
from sage_grpo.lab.worker import write_config
from sage_grpo.train.folder.identity import of_code
from sage_grpo.train.folder.lock import FolderLock


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a comparison ended."""

    finished: int
    """Runs that are done or diverged, from this call and from before."""
    failed: int
    missing: int
    """Runs that were not made, for lack of time."""


def run(
    folder: Path,
    suite: Suite,
    jobs: Sequence[Job],
    *,
    command: str,
    side_by_side: int | None = None,
    mps: bool = True,
    budget: float | None = None,
    weights: bool = False,
) -> Ended:
    """Make the runs that the folder lacks."""
    began = time.monotonic()
    with FolderLock(folder), _stoppable():
        teller = Teller(len(jobs), suite)
        rows = folder / store.ROWS
        if store.repair(rows):
            teller.say(f"The last line of {rows} was cut off and is removed; its run is made again.")
        found = store.latest(store.read_rows(rows), [job.key for job in jobs])
        done = {key: row for key, row in found.items() if row["status"] in store.FINISHED}
        teller.look_back(done.values())
        store.save_suite(folder, suite, [job.key for job in jobs], command)
        missing = [job for job in jobs if job.key not in done]
        for job in missing:
            write_config(job, folder)
        devices = machine.gpus([job.config for job in missing]) if missing else []
        count = side_by_side or machine.how_many([job.config for job in missing], devices)
        count = max(1, min(count, len(missing)))
        ended = dict(done)
        with machine.mps(bool(devices) and count > 1 and mps) as (environment, remark):
            places = [machine.environment(devices, number) | environment for number in range(count)]
            workers = [Worker(folder, number, place) for number, place in enumerate(places)]

            def keep(job: Job, row: dict[str, Any]) -> None:
                store.append(rows, {"suite": suite.name, **row})
                ended[job.key] = row
                teller.ended(job, row, pool)

            left = None if budget is None else budget - (time.monotonic() - began)
            pool = Pool(missing, workers, keep, weights=weights, budget=left)
            if missing:
                where = f"GPU {', '.join(devices)}" if devices else "the CPU"
                teller.say(f"{len(missing)} runs to make, {count} side by side on {where}. {remark}".rstrip())
                with teller.watching():
                    pool.run(teller.look)
        failed = sum(row["status"] == "failed" for row in ended.values())
        return Ended(finished=len(ended) - failed, failed=failed, missing=len(jobs) - len(ended))


class Teller:
    """Says how far a comparison is: a bar where a person looks, a line per run where not."""

    def __init__(self, total: int, suite: Suite) -> None:
        self.total, self.column = total, suite.columns[0]
        self.console = Console(highlight=False, stderr=True)
        self._done = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=total, note="")

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, soft_wrap=True, markup=False)

    def look_back(self, rows: Any) -> None:
        """Runs that are there already; a warning where other code made them."""
        rows = list(rows)
        self._done = len(rows)
        others = sorted({row["code"][:24] for row in rows if row.get("code") and row["code"] != of_code()})
        if rows:
            self.say(f"{len(rows)} of {self.total} runs are there already.")
        if others:
            self.say(
                f"Warning: some of them were made by other code ({', '.join(others)}...). Choose another --out to make all of them anew."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While runs are made."""
        self._bar.update(self._task, completed=self._done)
        with self._bar:
            yield

    def ended(self, job: Job, row: Mapping[str, Any], pool: Pool) -> None:
        """A run ended."""
        self._done += 1
        last = row["evaluations"].get(str(row["iterations"]), {}).get(self.column.key)
        result = row["status"] if last is None else f"{self.column.title} {last:.4f}"
        fault = f": {row['error']}" if row["error"] else ""
        self.say(f"{self._done}/{self.total}  {job.name}: {result}{fault}  ({minutes(pool.left())} left)")

    def look(self, pool: Pool) -> None:
        """Now and then."""
        note = f"{len(pool.running)} under way, {minutes(pool.left())} left"
        self._bar.update(self._task, completed=self._done, note=note)


def minutes(seconds: float | None) -> str:
    """A time for people."""
    if seconds is None:
        return "? min"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


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
