"""One run, measured: train and evaluate (or only sample), and everything about it as one row."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import sage_grpo
from sage_grpo.lab.prepare import Job, head
from sage_grpo.rewards.base import RewardFailure
from sage_grpo.train.build import build
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.events import SentinelEvent
from sage_grpo.train.folder.identity import of_code, plain
from sage_grpo.train.forecast.passes import references
from sage_grpo.train.plan import Plan
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Diverged
from sage_grpo.train.watch import Watch

BLOCKS = 30
"""Points of a training curve, at most."""
Scores = dict[str, float | None]
Bases = dict[str, tuple[Scores, list[dict[str, Any]]]]
"""Evaluations of untrained models: means, and the scores of every clip."""
Progress = Callable[[int], None]


class Record:
    """What is known about a run so far; also one that diverges or fails leaves what it had."""

    def __init__(self) -> None:
        self.evaluations: dict[str, Scores] = {}
        self.passes: dict[str, int] = {}
        self.training: list[dict[str, float]] = []
        self.grid: dict[int, dict[str, float]] = {}
        """By step of the run's grid: what the kernel predicts."""
        self.updates = self.cost = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.sentinel: list[list[Any]] = []
        """What the sentinel said and did: iteration, name, action."""

    def content(self) -> dict[str, Any]:
        """The row's part that the run itself decides; the same for the same settings and seed."""
        return {
            "reached": len(self.training),
            "evaluations": self.evaluations,
            "passes": self.passes,
            "updates": self.updates,
            "training": blocks(self.training),
            "steps": by_step(self.training, self.grid),
            "sentinel": self.sentinel,
        }


def measure(job: Job, bases: Bases, progress: Progress, weights: Path | None = None) -> dict[str, Any]:
    """Run a job; returns its row. `bases` remembers evaluations of untrained models, which many runs have in common."""
    start, record = time.perf_counter(), Record()
    status, fault = "done", None
    try:
        trainer = Trainer(job.config, build(job.config))
        trainer.encode_prompts()
        if job.kind == "rollout":
            sample(trainer, record, progress)
        else:
            train(trainer, job.points, record, bases, progress)
        if weights is not None:
            trainer.export(weights)
    except (Diverged, RewardFailure) as error:
        status, fault = ("diverged" if isinstance(error, Diverged) else "failed"), f"{type(error).__name__}: {error}"
    count = max(1, len(record.training))
    seconds = {
        "iteration": record.seconds["iterations"] / count,
        "evaluate": record.seconds["evaluate"],
        "total": time.perf_counter() - start,
    }
    return {
        **head(job, status, fault),
        **record.content(),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        **surroundings(job.config),
    }


def train(trainer: Trainer, points: Sequence[int], record: Record, bases: Bases, progress: Progress) -> None:
    """Train to the end; evaluate at the points."""
    for step in range(trainer.planner.grid.num_steps):
        record.grid[step] = predicted(trainer, step)

    def tell(event: SentinelEvent) -> None:
        record.sentinel.append([event.iteration, event.name, event.action])

    with TemporaryDirectory() as folder:  # for what the sentinel may go back to
        watch = Watch(
            trainer.config, trainer.state, trainer.writer, Path(folder), tell, held_out=bool(trainer.held_out)
        )
        _iterate(trainer, points, record, bases, progress, watch)


def _iterate(
    trainer: Trainer,
    points: Sequence[int],
    record: Record,
    bases: Bases,
    progress: Progress,
    watch: Watch,
) -> None:
    config, state = trainer.config, trainer.state
    while True:
        number = state.iteration
        if number in points and trainer.held_out:
            record.evaluations[str(number)], rows = _evaluate(trainer, record, bases)
            record.passes[str(number)] = record.cost
            state.evaluated = number
            watch.look_at_clips(rows)
        back = watch.act()
        if watch.mark(saving=False):
            trainer.save(watch.root)
        progress(number)
        if watch.stops or (
            back and number == config.iterations
        ):  # its end is what the weights are worth that it ends with
            record.evaluations[str(config.iterations)], _ = _evaluate(trainer, record, bases)
            record.passes[str(config.iterations)] = record.cost
        if number >= config.iterations or watch.stops:
            return
        plan = trainer.planner.plan(number, state.stream.peek(config.batch.prompts))
        row = trainer.step()
        record.cost += rollout_cost(plan) + update_cost(plan, references(config, number, plan.updates))
        record.seconds["iterations"] += row["time/total"]
        record.training.append(row | watch.look(row))
        record.updates = state.updates
        for label, weight in plan.equalizer.items():
            record.grid[label]["weight"] = weight


def _evaluate(trainer: Trainer, record: Record, bases: Bases) -> tuple[Scores, list[dict[str, Any]]]:
    config = trainer.config
    # The base is the same for all runs of the same model on the same prompts, whatever they learn with.
    parts = [config.model, *config.rewards, config.evaluate, config.data]
    text = json.dumps([config.batch.micro_batch, *(plain(asdict(part)) for part in parts)], sort_keys=True)
    base = hashlib.sha256(text.encode()).hexdigest() if trainer.state.iteration == 0 else ""
    if base not in bases or not base:
        start = time.perf_counter()
        found = trainer.evaluate()
        trainer.clock.report()  # what it took is no part of the next iteration
        record.seconds["evaluate"] += time.perf_counter() - start
        scores = {name.removeprefix("eval/"): figure(value) for name, value in found.metrics.items()}
        if not base:
            return scores, found.rows
        bases[base] = scores, found.rows
    return bases[base]


def sample(trainer: Trainer, record: Record, progress: Progress) -> None:
    """Only sample, with exploration, and score; the means stand where an evaluation's would."""
    config, state = trainer.config, trainer.state
    totals: dict[str, list[torch.Tensor]] = defaultdict(list)
    for step in range(trainer.planner.grid.num_steps):
        record.grid[step] = predicted(trainer, step)
    for number in range(config.iterations):
        start = time.perf_counter()
        plan = trainer.planner.plan(number, state.stream.take(config.batch.prompts))
        rollout = trainer.roll_out(plan)
        scored = trainer.score(trainer.decode(rollout), plan)
        for name, values in {**scored.parts, "total": scored.total}.items():
            totals[name].append(values)
        record.cost += rollout_cost(plan)
        record.seconds["iterations"] += time.perf_counter() - start
        record.training.append({"reward/total": float(scored.total.nanmean())})
        progress(number + 1)
    found = {name: torch.cat(values) for name, values in totals.items()}
    scores = {name: figure(float(values.nanmean())) for name, values in found.items()}
    scores["clips"] = float(len(found["total"]))
    record.evaluations[str(config.iterations)] = scores
    record.passes[str(config.iterations)] = record.cost


def rollout_cost(plan: Plan) -> int:
    """Samples through the network in a rollout; what a group shares counts once."""
    shared = len({key for group in plan.groups for key in plan.trunk(group)})
    apart = [
        len(batch.members) * (plan.group_of(batch).schedule.num_steps - plan.group_of(batch).branch)
        for rank in range(len(plan.shares))
        for batch in plan.batches(rank)
    ]
    return shared + sum(apart)


def update_cost(plan: Plan, references: Sequence[int]) -> int:
    """Samples through the network in the updates: forward and backward 3, a reference's forward pass (anchor, old policy; so many in each
    update) 1, measuring the step 1."""
    ranks = range(len(plan.shares))
    updates = range(plan.updates)
    replayed = sum(
        (3 + references[u]) * replay.rows for rank in ranks for u in updates for replay in plan.replays(rank, u)
    )
    return replayed + sum(replay.rows for rank in ranks for replay in plan.gauged(rank))


def predicted(trainer: Trainer, step: int) -> dict[str, float]:
    """What the kernel says about a step of the run's grid: sensitivity |b| / std (where there is noise) and std."""
    transition = trainer.planner.kernel(*trainer.planner.grid.pair(step))
    std = float(transition.std)
    return {"std": std, **({"sensitivity": float(transition.sensitivity)} if std > 0 else {})}


def blocks(rows: Sequence[Mapping[str, float]], most: int = BLOCKS) -> dict[str, list[float | None]]:
    """Training metrics as means over blocks of iterations; `iteration` is the last of each block."""
    size = max(1, math.ceil(len(rows) / most))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    names = sorted({name for row in rows for name in row if not name.startswith("time/") and name.count("/") < 2})
    curve: dict[str, list[float | None]] = {
        "iteration": [float(min((n + 1) * size, len(rows))) for n in range(len(parts))]
    }
    for name in names:
        columns = [[row[name] for row in part if name in row] for part in parts]
        curve[name] = [figure(sum(column) / len(column)) if column else None for column in columns]
    return curve


def by_step(rows: Sequence[Mapping[str, float]], grid: Mapping[int, Mapping[str, float]]) -> dict[str, Scores]:
    """Mean gradient norms of every step that was trained, beside what the kernel predicts."""
    steps: dict[str, Scores] = {}
    for step, known in sorted(grid.items()):
        found = {kind: [row[name] for row in rows if (name := f"gradient/{kind}/{step:03d}") in row] for kind in KINDS}
        norms = {kind: figure(sum(values) / len(values)) for kind, values in found.items() if values}
        steps[str(step)] = {**{name: figure(value) for name, value in known.items()}, **norms}
    return steps


KINDS = ("raw", "equalized", "sent")
"""Gradient norms that the trainer logs by step."""


def figure(value: float) -> float | None:
    """Seven digits; JSON has no NaN and no infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def surroundings(config: TrainConfig) -> dict[str, Any]:
    """Hardware, versions and code: what may explain that another machine's figures differ."""
    cuda = torch.cuda.is_available() and config.model.device != "cpu"
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else _processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
        },
        "versions": {
            "sage-grpo": sage_grpo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found for name in ("diffusers", "transformers", "peft") if (found := _version(name))},
        },
        "commit": commit(),
        "code": _code(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _code() -> str:
    return of_code()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def commit() -> str:
    """The commit of the source, "+changes" where it was edited; empty where it is no checkout."""
    folder = Path(sage_grpo.__file__).parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    try:
        number = git("rev-parse", "--short=12", "HEAD")
        return f"{number}+changes" if number and git("status", "--porcelain", "--", ".") else number
    except OSError:  # no git
        return ""
