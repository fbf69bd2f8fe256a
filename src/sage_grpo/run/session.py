"""A run from start to end, for `sage-grpo train`, Python programs and the doctor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from sage_grpo.callbacks import journal
from sage_grpo.callbacks.metrics import Metrics
from sage_grpo.callbacks.observers import CheckpointSaver, VideoFolder, export, note, observers_of
from sage_grpo.callbacks.terminal import Terminal, outliving_output, plan_table
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import RankLost, World, start
from sage_grpo.models.base import abilities
from sage_grpo.plan.costs import choose_activations
from sage_grpo.plan.passes import evaluations_of
from sage_grpo.plan.show import opening
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.run import identity
from sage_grpo.run.identity import FINISHED, FoundRun, find_run
from sage_grpo.run.lock import by_main, owned
from sage_grpo.run.preflight import preflight
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.events import Hooks, RunEnded, StopRequest
from sage_grpo.training.guard import HealthGuard
from sage_grpo.training.inputs import Inputs, Overrides, build, load_sources
from sage_grpo.training.loop import Loop
from sage_grpo.training.loss import Diverged
from sage_grpo.training.trainer import Trainer
from sage_grpo.utils.clock import Clock
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.workers.dispatcher import make_workers
from sage_grpo.workers.messages import WorkerError


@contextmanager
def session(
    config: TrainConfig, given: Overrides | None = None, remark: Callable[[str], None] | None = None
) -> Iterator[World]:
    """Start the ranks, refuse invalid runs before anything heavy is loaded, and monitor the ranks while inside.

    `remark` gets the remarks of preflight in the main process; None skips preflight (the doctor runs it as a check).
    """
    world, lost = start(config.parallel, config.model.device), False
    try:
        if remark is not None:
            for text in preflight(config, world.size, given):
                if world.is_main:
                    remark(text)
        with world.watching():
            yield world
    except RankLost:
        lost = True
        raise
    finally:
        if not lost:  # else closing would wait for the lost rank
            world.close()


def assemble(config: TrainConfig, inputs: Inputs, world: World | None = None, clock: Clock | None = None) -> Trainer:
    """Build a trainer with the memory plan of this machine and the configured workers."""
    world = world or World()
    activations = choose_activations(config, inputs.model, world)
    return Trainer(config, inputs, world, clock, activations=activations, workers=make_workers)


def run(
    config: TrainConfig,
    world: World | None = None,
    given: Overrides | None = None,
    hooks: Hooks | None = None,
    stop: StopRequest | None = None,
    *,
    quiet: bool = False,
) -> RunEnded:
    """Train to the end, resuming a run in the folder; `given` replaces parts of the configuration by objects."""
    world, given, out = world or World(), given or Overrides(), Path(config.out)
    with outliving_output(), owned(out, world):
        terminal = Terminal(enabled=world.is_main and not quiet, progress=config.log.progress, total=config.iterations)
        sources = load_sources(config, given)
        text = by_main(world, lambda: json.dumps(dataclasses.asdict(find_run(config, sources, given, out))))
        found = FoundRun(**json.loads(text))
        for text in found.notes:
            terminal.say(text, style="yellow")
        if found.finished is not None:
            terminal.say(
                f"{out} is finished: {found.finished} iterations are done, weights in {out / 'final'}. Nothing was changed; raise "
                "`iterations` to train on."
            )
            return RunEnded(found.finished, stopped=False)

        def listen(phase: str, done: int, total: int) -> None:
            world.note(f"{phase} {done}/{total}")
            terminal.listen(phase, done, total)

        if world.is_main and not quiet and given.model is None:
            for line in opening(config, world.processes):
                terminal.say(line)
        inputs = build(config, world, given, sources)
        trainer = assemble(config, inputs, world, Clock(listen))
        resumed = _resume(trainer, out, found, terminal)
        metrics = _open_metrics(trainer, found, terminal, resumed)
        saver = CheckpointSaver(trainer, out / "checkpoints", found.identity, metrics)
        stop = stop or StopRequest()
        loop = _loop(trainer, terminal, metrics, hooks or Hooks(), saver, stop)
        try:
            with stop.listening(), terminal:
                trainer.encode_prompts()
                terminal.start_at(trainer.state.iteration)
                stopped = loop.run()
                if stopped:
                    cause = (
                        "by the sentinel" if loop.guard.stops else "as asked" if stop.signal is None else "by signal"
                    )
                    number = trainer.state.iteration
                    where = f"after iteration {number}; saved" if number else "before the first iteration"
                    note(trainer, "stop", cause)
                    terminal.say(f"Stopped {cause} {where}. The same command continues from here.")
                else:
                    _finish(trainer, terminal)
            return RunEnded(trainer.state.iteration, stopped=stopped, model=trainer.model)
        except (Diverged, RewardFailure, WorkerError) as error:
            note(trainer, "diverged" if isinstance(error, Diverged) else "failed", str(error))
            raise
        finally:
            trainer.close()
            metrics.close()


def _loop(
    trainer: Trainer, terminal: Terminal, metrics: Metrics, hooks: Hooks, saver: CheckpointSaver, stop: StopRequest
) -> Loop:
    config = trainer.config
    samples = VideoFolder(Path(config.out) / "videos", megabytes=config.keep.video_megabytes)
    guard = HealthGuard(config, trainer.state, trainer.world, saver.root, held_out=bool(trainer.held_out))
    observers = observers_of(trainer, metrics, terminal, samples, hooks, saver)
    return Loop(trainer, guard, saver, observers, config.evaluate.points(config.iterations), stop)


def _finish(trainer: Trainer, terminal: Terminal) -> None:
    out, number = Path(trainer.config.out), trainer.state.iteration
    fault = export(trainer, out / "final")
    if fault:
        raise checkpoint.SaveFailed(
            f"The trained weights could not be written to {out / 'final'}: {fault}. Checkpoint {number} has them: fix the cause, "
            "and the same command writes them."
        )
    signs, best = ", ".join(trainer.state.sentinel.doubts), trainer.state.best.get("iteration", 0)
    advice = f"best/ has those after iteration {best}" if best else "look at their clips before you use them"
    # Findings of the last evaluation have no action.
    doubt = f"The sentinel warned about the final weights ({signs}): {advice}." if signs else ""
    if trainer.world.is_main:
        replace_text(out / FINISHED, f"{number}\n")
        note(trainer, "finish", doubt)
    terminal.say(f"Done. Weights: {out / 'final'}   metrics: {out / 'metrics.jsonl'}   videos: {out / 'videos'}")
    if doubt:
        terminal.say(doubt, style="yellow")


def _resume(trainer: Trainer, out: Path, found: FoundRun, terminal: Terminal) -> int | None:
    """Resume an existing run; returns its iteration."""
    folder = out / "checkpoints" / found.checkpoint
    if found.checkpoint:
        trainer.state.load(folder, trainer.world)
    counted, guidance = abilities(trainer.model).branches, trainer.config.model.training_guidance

    def branches(sigma: float) -> int:
        return 1 if counted is None else counted(sigma, guidance)

    plan = trainer.planner.foresee(trainer.planner.plan(0, trainer.state.stream.peek(trainer.config.batch.prompts)))
    terminal.console.print(
        plan_table(
            trainer.config,
            plan,
            dims=trainer.dims,
            clip_range=trainer.clip_range,
            device=str(trainer.model.device),
            parameters=trainer.state.size,
            evaluations=evaluations_of(trainer.config, plan, branches),
            choices=abilities(trainer.model).choices or None,
        )
    )
    if not found.checkpoint:
        return None
    terminal.say(f"Resumed from {folder} at iteration {trainer.state.iteration}.")
    if found.changed:
        terminal.say(f"The run differs from the checkpoint's in: {', '.join(found.changed)}.", style="yellow")
    return trainer.state.iteration


def _open_metrics(trainer: Trainer, found: FoundRun, terminal: Terminal, resumed: int | None) -> Metrics:
    """Write the files of the run's start, and open the journal and the loggers; only in the main process."""
    config, out = trainer.config, Path(trainer.config.out)
    if not trainer.world.is_main:
        return Metrics()
    coming = trainer.planner.plan(trainer.state.iteration, trainer.state.stream.peek(config.batch.prompts))
    if trainer.inputs.examples is not None:
        terminal.say(trainer.inputs.examples.summary)
    replace_text(out / "schedule.json", json.dumps(coming.groups[0].noise()))
    replace_text(out / "config.yaml", yaml.safe_dump(identity.plain(dataclasses.asdict(config)), sort_keys=False))
    copy = out / "checkpoints" / found.checkpoint / journal.METRICS  # the rows of the checkpoint
    rows, notice = journal.reopen(out / journal.METRICS, copy.read_bytes() if found.checkpoint else None)
    if notice:
        terminal.say(notice, style="yellow")
    kind, texts = ("start" if resumed is None else "resume"), [notice, *found.notes]
    texts += [f"changed: {', '.join(found.changed)}"] if found.changed else []
    metrics = Metrics.open(out, config.log, dataclasses.asdict(config), journal=rows, resumed_at=resumed)
    note(trainer, kind, " ".join(text for text in texts if text))
    return metrics
