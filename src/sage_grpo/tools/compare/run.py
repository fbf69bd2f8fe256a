"""A comparison from start to end: workers make the missing runs, and rows are written as they come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sage_grpo.run.identity import plain
from sage_grpo.run.lock import locked
from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Suite
from sage_grpo.tools.compare.prepare import CompareJob
from sage_grpo.tools.compare.worker import Row, Worker, make_all
from sage_grpo.training.config import TrainConfig
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import fixed
from sage_grpo.worlds.world import SHAPES

PER_GPU = 16
"""Runs of a world's model that one large GPU serves well (H200 under MPS); a real model has the GPU to itself."""


def run(
    folder: Path,
    suite: Suite,
    jobs: Sequence[CompareJob],
    *,
    command: str,
    arms: Collection[str] | None = None,
    side_by_side: int | None = None,
    weights: bool = False,
) -> int:
    """Make the missing runs of these arms (None: of all); returns the number that failed."""
    console = Console(highlight=False, stderr=True)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    with locked(folder), _stoppable():
        done = _done(folder, suite, jobs, command, say)
        asked = [job for job in jobs if arms is None or job.arm in arms]
        missing = [job for job in asked if job.key not in done]
        if len(missing) < len(asked):
            say(f"{len(asked) - len(missing)} of {len(asked)} runs are there already.")
        for job in missing:  # as `sage-grpo train --config` takes it
            config = yaml.safe_dump(plain(asdict(job.config)), sort_keys=False)
            replace_text(folder / "configs" / job.file, config)
        if not missing:
            return 0
        kept = store.kept(folder, [job.key for job in missing])
        missing.sort(key=lambda job: job.key not in kept)  # those that were cut off first
        devices = gpus([job.config for job in missing])
        count = min(side_by_side or how_many([job.config for job in missing], devices), len(missing))
        workers = [Worker(folder, n, environment(devices, n), weights) for n in range(count)]
        where = f"GPU {', '.join(devices)}" if devices else "the CPU"
        say(f"{len(missing)} runs to make, {count} side by side on {where}.")
        failed = 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(asked), completed=len(asked) - len(missing))

            def keep(job: CompareJob, row: Row) -> None:
                nonlocal failed
                store.append(folder / store.ROWS, {"suite": suite.name, **row})
                if row["status"] in store.FINISHED:
                    store.forget(folder, job.key)
                failed += row["status"] == "failed"
                bar.advance(task)
                say(f"{bar.tasks[0].completed:.0f}/{len(asked)}  {job.name}: {_result(suite, row)}")

            make_all(missing, workers, keep, lambda job, text: say(f"{job.name}: {text}"))
        return failed


def _done(
    folder: Path, suite: Suite, jobs: Sequence[CompareJob], command: str, say: Callable[[str], None]
) -> dict[str, Row]:
    file, keys = folder / store.ROWS, [job.key for job in jobs]
    if store.repair(file):
        say(f"The last line of {file} was cut off and is removed; its run is made again.")
    rows = store.latest(store.read_rows(file), keys)
    done = {key: row for key, row in rows.items() if row["status"] in store.FINISHED}
    store.save_suite(folder, suite, keys, command)
    for key in store.kept(folder, done):  # stopped between the two
        store.forget(folder, key)
    return done


def _result(suite: Suite, row: Row) -> str:
    column = suite.columns[0]
    last = row["evaluations"].get(str(row["iterations"]), {}).get(column.key)
    result = row["status"] if last is None else f"{column.title} {fixed(last, 4)}"
    return f"{result}: {row['error']}" if row["error"] else result


def gpus(configs: Sequence[TrainConfig]) -> list[str]:
    """The GPUs for these runs, as in CUDA_VISIBLE_DEVICES; none where they run on the CPU."""
    if all(config.model.device == "cpu" for config in configs) or not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def how_many(configs: Sequence[TrainConfig], devices: Sequence[str]) -> int:
    if not devices:
        return cores()
    per_gpu = PER_GPU if all(config.model.path in (None, SHAPES.name) for config in configs) else 1
    return min(max(cores(), len(devices)), per_gpu * len(devices))


def environment(devices: Sequence[str], number: int) -> dict[str, str]:
    """Environment variables of a worker: one thread, one GPU in turn, and repeatable matrix products."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    one = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
    return {**threads, **one, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a comparison as Ctrl-C does: workers end, rows stay."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
