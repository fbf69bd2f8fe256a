"""One run, measured: train and evaluate (or only sample), and record everything as one row; an interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sage_grpo.distributed import checkpoint
from sage_grpo.plan.passes import references
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.run.identity import identify, of_code, plain
from sage_grpo.run.session import assemble
from sage_grpo.tools.compare.prepare import CompareJob, head
from sage_grpo.tools.compare.store import KEPT_EVERY
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.events import SentinelEvent, StopRequest
from sage_grpo.training.guard import HealthGuard
from sage_grpo.training.inputs import build, load_sources
from sage_grpo.training.loop import Loop, Observer
from sage_grpo.training.loss import Diverged
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.trainer import Trainer
from sage_grpo.utils.json_schema import finite, read_object
from sage_grpo.version import ROOT, __version__

BLOCKS = 30
KINDS = ("raw", "equalized", "sent")
"""Gradient norms that the trainer logs by step."""
Scores = dict[str, float | None]
Bases = dict[str, Evaluation]
RECORD = "metrics.jsonl"
"""File with the record in an unfinished run's checkpoint; the name is one that a checkpoint may have."""


@dataclass
class RunRecord:
    """The record of a run so far; a run that diverges or fails keeps it too."""

    evaluations: dict[str, Scores] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    training: list[dict[str, float]] = field(default_factory=list)
    clips: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    """By budget (passes, clips): the last iteration within it, once known."""
    by_prompt: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    """By evaluated iteration and score: one value for every prompt, in the order of the prompts. At budgets and at the end."""
    grid: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step of the run's grid: the kernel's prediction."""
    updates: int = 0
    cost: int = 0
    scored: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sentinel: list[list[Any]] = field(default_factory=list)
    """Warnings and actions of the sentinel: iteration, name, action."""

    def __post_init__(self) -> None:
        self._began = time.perf_counter()

    def content(self) -> dict[str, Any]:
        """The reproducible part of the row: the same for the same settings and seed."""
        names = ("evaluations", "passes", "clips", "budgets", "by_prompt", "updates", "sentinel")
        values = {name: getattr(self, name) for name in names}
        steps = by_step(self.training, self.grid)
        return {**values, "reached": len(self.training), "training": blocks(self.training), "steps": steps}

    def times(self) -> dict[str, float]:
        """Seconds of an iteration, of all evaluations, and of the run, with those before an interruption."""
        return {
            "iteration": self.seconds["iterations"] / max(1, len(self.training)),
            "evaluate": self.seconds["evaluate"],
            "total": self.seconds["before"] + time.perf_counter() - self._began,
        }

    def state_dict(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "seconds": {**self.seconds, "before": self.times()["total"]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` that was read from a file, where keys are text."""
        for name, value in state.items():
            setattr(self, name, value)
        self.grid = {int(step): values for step, values in self.grid.items()}
        self.seconds = defaultdict(float, self.seconds)


def measure(
    job: CompareJob,
    bases: Bases,
    weights: Path | None = None,
    unfinished: Path | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a job; returns its row. `bases` caches evaluations of untrained models, which many runs share. `unfinished` is the folder where
    the run is kept while it is under way, and from which an interrupted one resumes."""
    record = RunRecord()
    status, fault = "done", None
    try:
        with (
            TemporaryDirectory() as folder,  # for a run that will not be continued
            # Given clips are encoded into the run's folder, which a compared run does not have.
            closing(assemble(replace(job.config, out=folder), build(job.config))) as trainer,
        ):
            if job.kind == "rollout":
                sample(trainer, record)
            else:
                root = unfinished or Path(folder) / "run"
                train(job, bases, SavedRun(trainer, record, root, made_by(job), on_note))
        if weights is not None:
            trainer.export(weights)
    except (Diverged, RewardFailure) as error:
        status, fault = ("diverged" if isinstance(error, Diverged) else "failed"), f"{type(error).__name__}: {error}"
    return {
        **head(job, status, fault),
        **record.content(),
        "seconds": record.times(),
        **surroundings(job.config),
    }


@dataclass(frozen=True)
class Recording(Observer):
    """Writes a run's record: every iteration's row and cost, and every evaluation's scores."""

    trainer: Trainer
    record: RunRecord
    bases: Bases
    budgets: Mapping[str, int]
    points: set[int]
    """Iterations to evaluate; the last one within a budget is added as soon as the next one would exceed it."""

    def after(self, row: dict[str, float]) -> None:
        trainer, record, plan = self.trainer, self.record, self.trainer.plan
        assert plan is not None  # of the iteration that is complete
        passes = references(trainer.config, plan.iteration, plan.updates)
        spent = {"passes": rollout_cost(plan) + update_cost(plan, passes), "clips": scored_clips(plan)}
        record.cost += spent["passes"]
        record.scored += spent["clips"]
        for name, total in {"passes": record.cost, "clips": record.scored}.items():
            limit = self.budgets.get(name)
            if limit is not None and name not in record.budgets and total <= limit < total + spent[name]:
                record.budgets[name] = trainer.state.iteration
                self.points.add(trainer.state.iteration)
        record.seconds["iterations"] += row["time/total"]
        record.training.append(row)
        record.updates = trainer.state.updates
        for label, weight in plan.equalizer.items():
            record.grid[label]["weight"] = weight

    def evaluated(self, found: Evaluation) -> None:
        self.keep(found, self.trainer.state.iteration)

    def keep(self, found: Evaluation, number: int) -> None:
        """Record scores as those after `number` iterations."""
        self.record.evaluations[str(number)] = _scores(found, self.trainer.config)
        self.record.passes[str(number)] = self.record.cost
        self.record.clips[str(number)] = self.record.scored
        if number in (self.trainer.config.iterations, *self.record.budgets.values()):
            self.record.by_prompt[str(number)] = by_prompt(found.rows)

    def health_event(self, event: SentinelEvent) -> None:
        self.record.sentinel.append([event.iteration, event.name, event.action])

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluate, or use the cache: many runs share an untrained model."""
        base = base_key(self.trainer.config) if self.trainer.state.iteration == 0 else ""
        if base in self.bases:
            return self.bases[base]
        start = time.perf_counter()
        found = self.trainer.evaluate(after_batch)
        self.record.seconds["evaluate"] += time.perf_counter() - start
        if base:
            self.bases[base] = found
        return found


class SavedRun:
    """The folder of a run under way: a checkpoint of its last point, and the one that its sentinel may roll back to. It is the loop's saver."""

    def __init__(
        self,
        trainer: Trainer,
        record: RunRecord,
        root: Path,
        made_by: Mapping[str, Any],
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`made_by` is all that decides the run's results, as JSON; `on_note` gets sentences for people."""
        self.trainer, self.record, self.root, self.made_by, self.on_note = trainer, record, root, dict(made_by), on_note
        self.points: Collection[int] = ()
        self._saved = time.monotonic()

    def due(self, number: int, *, last: bool, stopping: bool) -> bool:
        """At evaluated points, and when the last save is old; a finished run needs none."""
        late = time.monotonic() - self._saved > KEPT_EVERY
        return not (last or stopping) and (number in self.points or late)

    def save(self, *, needed: bool) -> Path | None:
        """Save this state. A full disk ends the run only where its sentinel needs this checkpoint."""
        trainer, number = self.trainer, self.trainer.state.iteration
        if number >= trainer.config.iterations:
            return None
        try:
            record = json.dumps(self.record.state_dict()).encode()
            trainer.save(self.root, {"made_by": self.made_by}, {RECORD: record})
            checkpoint.prune(self.root, 1, number, spare=trainer.state.sentinel.good)
        except (checkpoint.SaveFailed, OSError) as error:
            if needed:
                raise
            self.on_note(f"iteration {number} could not be kept ({error}). The run continues.")
        self._saved = time.monotonic()
        return None

    def resume(self) -> None:
        """Restore trainer and record to the last point, to the bit."""
        if not self.root.is_dir():
            return
        checkpoint.recover(self.root)
        folder = checkpoint.newest_good(self.root)
        fault = "its checkpoints are damaged" if folder is None else self._fault(folder)
        if folder is None or fault:
            self.on_note(f"its saved state cannot be continued ({fault}): the run starts again.")
            shutil.rmtree(self.root)
            return
        self.trainer.state.load(folder, self.trainer.world)
        self.record.load_state_dict(read_object(folder / RECORD))
        self.on_note(f"continues after iteration {self.trainer.state.iteration}.")

    def _fault(self, folder: Path) -> str:
        meta = checkpoint.read_meta(folder)
        known = meta.get("made_by", {})
        other = [name for name in sorted({*known, *self.made_by}) if known.get(name) != self.made_by.get(name)]
        if other:
            return f"it was made by another {', '.join(other)}"
        with checkpoint.continuing(folder):
            good = meta["sentinel"]["good"]
            fault = None if good is None else checkpoint.find_fault(self.root / f"{int(good):06d}")
        return f"the checkpoint that its sentinel may roll back to is damaged: {fault}" if fault else ""


def train(job: CompareJob, bases: Bases, saved: SavedRun) -> None:
    """Train to the end, from the start or from the interruption; evaluate at the points and budgets."""
    trainer, record = saved.trainer, saved.record
    for step in range(trainer.planner.grid.num_steps):
        record.grid[step] = predicted(trainer, step)
    saved.resume()
    trainer.encode_prompts()  # the prompts depend on the iteration
    saved.points = points = {*job.points, *record.budgets.values()}
    recording = Recording(trainer, record, bases, job.budgets, points)
    guard = HealthGuard(trainer.config, trainer.state, trainer.world, saved.root, held_out=bool(trainer.held_out))
    loop = Loop(trainer, guard, saved, [recording], points, StopRequest(), recording.evaluate)
    if loop.run() and trainer.held_out:  # the last evaluation measures the final weights
        recording.keep(recording.evaluate(), trainer.config.iterations)
    if job.unseen:
        trainer.held_out = trainer.held_out[trainer.config.evaluate.prompts :]
        scores = _scores(trainer.evaluate(), trainer.config)
        record.evaluations[str(trainer.config.iterations)] |= {f"unseen/{name}": scores[name] for name in scores}


def base_key(config: TrainConfig) -> str:
    """Runs with equal keys have the same scores before training: those of the same model on the same prompts, whatever the method."""
    parts: list[Any] = [config.model, *config.rewards, config.evaluate, config.data]
    text = json.dumps([config.batch.micro_batch, *(plain(asdict(part)) for part in parts)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def with_plain_names(scores: Scores, config: TrainConfig) -> Scores:
    """Scores, with parts of the trained reward under their plain names too: a column asks for `TA` where another reward has a part of this name."""
    start = f"{next(reward.title for reward in config.rewards if reward.counts)}/"
    return {name.removeprefix(start): value for name, value in scores.items() if name.startswith(start)} | scores


def _scores(found: Evaluation, config: TrainConfig) -> Scores:
    scores = {name.removeprefix("eval/"): finite(value) for name, value in found.metrics.items()}
    return with_plain_names(scores, config)


def by_prompt(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The deciding scores of an evaluation, one value for every prompt (the mean of its clips), for intervals over prompts."""
    known = rows[0]["scores"] if rows else {}
    names = [name for name in ("Overall" if "Overall" in known else "total", "drift") if name in known]
    clips: dict[str, dict[str, list[float | None]]] = {name: defaultdict(list) for name in names}
    for row in rows:
        for name in names:
            clips[name][row["prompt"]].append(row["scores"][name])
    return {
        name: [None if None in values else round(sum(values) / len(values), 5) for values in prompts.values()]  # type: ignore[arg-type]
        for name, prompts in clips.items()
    }


def sample(trainer: Trainer, record: RunRecord) -> None:
    """Only sample, with exploration, and score; the means take the place of an evaluation's."""
    config, state = trainer.config, trainer.state
    trainer.encode_prompts()
    totals: dict[str, list[torch.Tensor]] = defaultdict(list)
    for step in range(trainer.planner.grid.num_steps):
        record.grid[step] = predicted(trainer, step)
    for number in range(config.iterations):
        start = time.perf_counter()
        plan = trainer.planner.plan(number, state.stream.take(config.batch.prompts))
        rollout = trainer.sample(plan)
        engine = trainer.engine
        scored = engine.gather(engine.score(engine.decode(rollout), plan, latents=engine.latents(rollout)))
        for name, values in {**scored.parts, "total": scored.total}.items():
            totals[name].append(values)
        record.cost += rollout_cost(plan)
        record.seconds["iterations"] += time.perf_counter() - start
        record.training.append({"reward/total": float(scored.total.nanmean())})
    found = {name: torch.cat(values) for name, values in totals.items()}
    scores = with_plain_names({name: finite(float(values.nanmean())) for name, values in found.items()}, config)
    scores["clips"] = float(len(found["total"]))
    record.evaluations[str(config.iterations)] = scores
    record.passes[str(config.iterations)] = record.cost


def scored_clips(plan: Plan) -> int:
    return 0 if plan.examples else sum(len(batch.members) for batch in _batches(plan))


def rollout_cost(plan: Plan) -> int:
    """Network evaluations of a rollout; a shared prefix counts once. Given clips cost none."""
    if plan.examples:
        return 0
    shared = sum(group.shared_steps for group in plan.groups)
    groups = [(batch, plan.group_of(batch)) for batch in _batches(plan)]
    return shared + sum(len(batch.members) * (group.schedule.num_steps - group.shared_steps) for batch, group in groups)


def _batches(plan: Plan) -> list[Any]:
    return [batch for rank in range(len(plan.shares)) for batch in plan.batches(rank)]


def update_cost(plan: Plan, references: Sequence[int]) -> int:
    """Network evaluations of the updates: forward and backward 3, a reference's forward pass (reference, old policy; `references` gives how many in each
    update) 1, measuring the step 1. Clips that count are those that an update trains: with micro-batches of one there are no others, and larger
    ones are a choice of the implementation, which replays them whole."""
    ranks, updates = range(len(plan.shares)), range(plan.updates)
    replayed = sum(
        (3 + references[u]) * _trained(plan, u, replay).rows
        for rank in ranks
        for u in updates
        for replay in plan.replays(rank, u)
    )
    return replayed + sum(len(rows) for rank in ranks for rows in plan.kl_replays(rank).values())


def _trained(plan: Plan, update: int, replay: Replay) -> Replay:
    if plan.chosen is None:
        return replay
    return replace(replay, members=tuple(one for one in replay.members if one in plan.chosen[update]))


def predicted(trainer: Trainer, step: int) -> dict[str, float]:
    """The kernel's values for a step of the run's grid: sensitivity |b| / std (where there is noise) and std."""
    transition = trainer.planner.kernel(*trainer.planner.grid.pair(step))
    std = float(transition.std)
    return {"std": std, **({"sensitivity": float(transition.sensitivity)} if std > 0 else {})}


def blocks(rows: Sequence[Mapping[str, float]], most: int = BLOCKS) -> dict[str, list[float | None]]:
    """Training metrics as means over blocks of iterations; `iteration` is the last of each block."""
    size = max(1, math.ceil(len(rows) / most))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    names = sorted({name for row in rows for name in row})
    # Without seconds and values by step.
    names = [name for name in names if not name.startswith("time/")]
    names = [name for name in names if name.count("/") < 2 or name.startswith("reward/")]
    curve: dict[str, list[float | None]] = {
        "iteration": [float(min((n + 1) * size, len(rows))) for n in range(len(parts))]
    }
    for name in names:
        columns = [[row[name] for row in part if name in row] for part in parts]
        curve[name] = [finite(sum(column) / len(column)) if column else None for column in columns]
    return curve


def by_step(rows: Sequence[Mapping[str, float]], grid: Mapping[int, Mapping[str, float]]) -> dict[str, Scores]:
    """Mean gradient norms of every trained step, beside the kernel's prediction."""
    steps: dict[str, Scores] = {}
    for step, known in sorted(grid.items()):
        found = {kind: [row[name] for row in rows if (name := f"gradient/{kind}/{step:03d}") in row] for kind in KINDS}
        norms = {kind: finite(sum(values) / len(values)) for kind, values in found.items() if values}
        steps[str(step)] = {**{name: finite(value) for name, value in known.items()}, **norms}
    return steps


def made_by(job: CompareJob) -> dict[str, Any]:
    """All that decides the results of a run: an interrupted run resumes only where it is the same."""
    around = surroundings(job.config)
    return {
        **identify(job.config, load_sources(job.config)),
        "configuration": job.key,
        "lab": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "device": around["machine"]["device"],
        "versions": around["versions"],
    }


def surroundings(config: TrainConfig) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and config.model.device != "cpu"
    versions = {"sage-grpo": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("diffusers", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    machine = {"device": device, "cores": os.cpu_count(), "system": platform.system()}
    return {"machine": machine, "versions": versions, "commit": _commit(), "code": _code()}


_code = cache(of_code)


@cache
def _commit() -> str:
    """The commit of the source, "+changes" where it was edited; empty outside a checkout or without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return ""
