"""A run from start to end: resume, log, evaluate, checkpoint, and stop cleanly when asked to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from sage_grpo.models.base import Explains
from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import RewardFailure
from sage_grpo.train import profiler
from sage_grpo.train.build import build
from sage_grpo.train.choosing import foresee
from sage_grpo.train.clock import Clock
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.events import (
    CallbackFailed,
    CheckpointEvent,
    Ended,
    EvaluationEvent,
    Hooks,
    IterationEvent,
    SentinelEvent,
    StopRequest,
)
from sage_grpo.train.folder import diary, identity, journal
from sage_grpo.train.folder.found import FINISHED, Found, look_around
from sage_grpo.train.folder.owned import by_main, owned, write
from sage_grpo.train.forecast.opening import opening
from sage_grpo.train.metrics import Clips, Metrics, attempt
from sage_grpo.train.own import Own
from sage_grpo.train.profiler import Recorder
from sage_grpo.train.samples import Samples
from sage_grpo.train.terminal import Terminal, outliving_output, plan_table
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Diverged
from sage_grpo.train.watch import Watch


class Interrupted(Exception):
    """A stop was asked for during an evaluation, which the continued run will do again."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What the loop works with."""

    trainer: Trainer
    out: Path
    found: Found
    metrics: Metrics
    samples: Samples
    terminal: Terminal
    hooks: Hooks
    stop: StopRequest
    watch: Watch


def train(config: TrainConfig, world: World | None = None) -> int:
    """Run `sage-grpo train`; returns the exit status."""
    run(config, world)
    return 0


def run(
    config: TrainConfig,
    world: World | None = None,
    own: Own | None = None,
    hooks: Hooks | None = None,
    stop: StopRequest | None = None,
    *,
    quiet: bool = False,
) -> Ended:
    """A run from start to end; `own` is what takes the place of what the configuration names (see `own.adopt`)."""
    world, own, out = world or World(), own or Own(), Path(config.out)
    with outliving_output(), owned(out, world):
        terminal = Terminal(enabled=world.is_main and not quiet, progress=config.log.progress, total=config.iterations)
        found = Found(
            **json.loads(by_main(world, lambda: json.dumps(dataclasses.asdict(look_around(config, own, out)))))
        )
        for note in found.notes:
            terminal.say(note, style="yellow")
        if found.finished is not None:
            terminal.say(
                f"{out} is finished: {found.finished} iterations are done, weights in {out / 'final'}. Nothing was changed; raise "
                "`iterations` to train on."
            )
            return Ended(found.finished, stopped=False)

        def listen(phase: str, done: int, total: int) -> None:
            world.note(f"{phase} {done}/{total}")
            terminal.listen(phase, done, total)

        if world.is_main and not quiet and own.model is None:
            for line in opening(config, world.processes):
                terminal.say(line)
        trainer = Trainer(config, build(config, world, own), world, Clock(listen))
        return _train(trainer, found, terminal, hooks or Hooks(), stop or StopRequest())


def _train(trainer: Trainer, found: Found, terminal: Terminal, hooks: Hooks, stop: StopRequest) -> Ended:
    config, world, out = trainer.config, trainer.world, Path(trainer.config.out)
    resumed = _resume(trainer, out, found, terminal)
    metrics = Metrics()
    if world.is_main:
        coming = trainer.planner.plan(trainer.state.iteration, trainer.state.stream.peek(config.batch.prompts))
        write(out / "schedule.json", json.dumps(coming.groups[0].noise()))
        write(out / "config.yaml", yaml.safe_dump(identity.plain(dataclasses.asdict(config)), sort_keys=False))
        rows, notice = journal.reopen(out / journal.NAME, _recorded(trainer, out, found))
        if notice:
            terminal.say(notice, style="yellow")
        metrics = Metrics.open(out, config.log, dataclasses.asdict(config), journal=rows, resumed_at=resumed)
        kind, texts = ("start" if resumed is None else "resume"), [notice, *found.notes]
        texts += [f"changed: {', '.join(found.changed)}"] if found.changed else []
        _note(trainer, kind, " ".join(text for text in texts if text))
    samples = Samples(out / "videos", megabytes=config.keep.video_megabytes)
    try:
        with stop.listening(), terminal:
            trainer.encode_prompts()

            def tell(event: SentinelEvent) -> None:
                _sentinel_says(running, event)

            watch = Watch(
                config, trainer.state, trainer.writer, out / "checkpoints", tell, held_out=bool(trainer.held_out)
            )
            running = Run(trainer, out, found, metrics, samples, terminal, hooks, stop, watch)
            return _loop(running)
    except (
        Diverged,
        RewardFailure,
    ) as error:  # all ranks alike, so they can also finish together what is being written
        _note(trainer, "diverged" if isinstance(error, Diverged) else "failed", str(error))
        trainer.writer.finish()
        raise
    finally:
        metrics.close()


def _loop(run: Run) -> Ended:
    trainer, out, terminal = run.trainer, run.out, run.terminal
    terminal.start_at(trainer.state.iteration)
    try:
        stopped = _iterate(run)
    except Interrupted:
        if trainer.state.iteration > 0:
            _save(run)
        stopped = True
    trainer.writer.finish()
    _prune(run)  # what was written in the background counts only now
    number = trainer.state.iteration
    if stopped:
        where = f"after iteration {number}; saved" if number else "before the first iteration"
        cause = "by the sentinel" if run.watch.stops else "as asked" if run.stop.signal is None else "by signal"
        _note(trainer, "stop", cause)
        terminal.say(f"Stopped {cause} {where}. The same command continues from here.")
        return Ended(number, stopped=True, model=trainer.model)
    fault = _export(trainer, out / "final")
    if fault:
        raise checkpoint.SaveFailed(
            f"The trained weights could not be written to {out / 'final'}: {fault}. Checkpoint {number} has them: mend the cause, "
            "and the same command writes them."
        )
    if trainer.world.is_main:
        write(out / FINISHED, f"{number}\n")
        _note(trainer, "finish", "")
    terminal.say(f"Done. Weights: {out / 'final'}   metrics: {out / 'metrics.jsonl'}   videos: {out / 'videos'}")
    return Ended(number, stopped=False, model=trainer.model)


def _iterate(run: Run) -> bool:
    """Iterations, evaluations and checkpoints; returns whether a signal ended them."""
    trainer = run.trainer
    config, state, world = trainer.config, trainer.state, trainer.world
    if _due(trainer):  # the first, or one that a stop cut short
        _evaluate(run)
        run.watch.act()
        if run.watch.mark(saving=False):
            _save(run)
    while state.iteration < config.iterations:
        row = _step(run)
        if row is None:  # it diverged, and the sentinel went back
            continue
        row |= run.watch.look(row)
        number, last = state.iteration, state.iteration == config.iterations
        run.metrics.write(number, row)
        run.terminal.iteration(number, row)
        run.terminal.failures(trainer.failures)
        if trainer.failures:
            _note(trainer, "failed", trainer.failures)
        if world.is_main and config.keep.videos_every and (number % config.keep.videos_every == 0 or last):
            count = config.keep.videos
            _keep(run, f"rollout-{number:06d}", trainer.videos[:count], trainer.captions[:count])
        _tell(run, run.hooks.iteration, IterationEvent(number, row, trainer.videos, trainer.captions))
        if _due(trainer):
            _evaluate(run)
        if run.watch.act() and last and trainer.held_out:
            _evaluate(run)  # the last figures are those of the weights that the run ends with
        stopping = world.any(run.stop.asked) or run.watch.stops
        if trainer.writer.background and world.any(trainer.writer.failed):
            trainer.writer.finish()  # raises what went wrong
        if run.watch.mark(saving=last or stopping or number % config.keep.checkpoint_every == 0):
            _save(run)
        if stopping and not last:
            return True
    return False


def _step(run: Run) -> dict[str, float] | None:
    """One iteration; None where it diverged and the run went back to a good checkpoint instead."""
    try:
        return _recorded_step(run)
    except Diverged as error:
        wanted = run.trainer.config.sentinel.action == "rollback"
        if not wanted or not run.watch.roll_back(f"not_finite ({error})") or run.watch.stops:
            raise
        return None


def _sentinel_says(run: Run, event: SentinelEvent) -> None:
    run.terminal.say(
        f"sentinel: {event.name}: {event.text}" if event.action == "warn" else f"sentinel: {event.text}", style="yellow"
    )
    _note(run.trainer, "sentinel", event.text if event.action != "warn" else f"{event.name}: {event.text}")
    _tell(run, run.hooks.sentinel, event)


def _recorded_step(run: Run) -> dict[str, float]:
    """One iteration, recorded by the main process where `profile` says so."""
    trainer, number = run.trainer, run.trainer.state.iteration
    if number != trainer.config.profile or not trainer.world.is_main:
        return trainer.step()
    recorder = trainer.clock.recorder = Recorder(run.out / profiler.FOLDER)
    try:
        row = trainer.step()
    finally:
        trainer.clock.recorder = None
    attempt(f"Writing the profile to {recorder.folder}", lambda: run.terminal.say(recorder.write_table(number, row)))
    run.terminal.say(f"Profile of iteration {number + 1}: {recorder.folder} (open the traces in ui.perfetto.dev).")
    return row


def _keep(run: Run, name: str, clips: Any, captions: list[str], rows: list[dict[str, Any]] | None = None) -> list[Path]:
    """Save clips as videos; a run can do without, so a full disk is only named."""
    files: list[Path] = []
    fps = run.trainer.model.video.fps
    attempt(
        f"Saving videos to {run.samples.folder}",
        lambda: files.extend(run.samples.save(name, clips, captions, fps, rows or ())),
    )
    return files


def _note(trainer: Trainer, kind: str, text: str) -> None:
    """Write an event down; a run can do without."""
    out = Path(trainer.config.out)
    if trainer.world.is_main:
        attempt(f"Writing to {out / diary.NAME}", lambda: diary.note(out, kind, trainer.state.iteration, text))


def _tell(run: Run, hook: Callable[[Any], object] | None, event: Any) -> None:
    """Call a program's function in the main process; what it raises ends the run on all ranks, saved."""
    trainer, raised = run.trainer, None
    if hook is None:
        return
    if trainer.world.is_main:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - users' code may raise anything, and the other ranks wait
            raised = error
    if trainer.world.any(raised is not None):
        if trainer.state.iteration > 0 and not isinstance(event, CheckpointEvent):
            _write_checkpoint(run)
        trainer.writer.finish()
        raise raised or CallbackFailed("A callback of the main process raised; its own message has the traceback.")


def _save(run: Run) -> None:
    folder = _write_checkpoint(run)
    event = CheckpointEvent(run.trainer.state.iteration, folder, complete=not run.trainer.writer.background)
    _tell(run, run.hooks.checkpoint, event)


def _write_checkpoint(run: Run) -> Path:
    root = run.out / "checkpoints"
    folder = run.trainer.save(root, {"identity": run.found.identity}, {journal.NAME: run.metrics.rows})
    _prune(run)
    return folder


def _prune(run: Run) -> None:
    if run.trainer.world.is_main:
        keep, state = run.trainer.config.keep.checkpoints, run.trainer.state
        checkpoint.prune(run.out / "checkpoints", keep, state.iteration, spare=state.sentinel.good)


def _export(trainer: Trainer, folder: Path) -> str:
    """Write weights; returns what went wrong with the main process's files, on all ranks."""
    fault = ""
    try:
        trainer.export(folder)
    except (OSError, SafetensorError) as error:  # of the main process, which alone writes
        fault = f"{type(error).__name__}: {error}"
        trainer.world.barrier()  # the one at which the others wait
    return trainer.world.from_main(fault)


def _due(trainer: Trainer) -> bool:
    """Whether this iteration is to be evaluated and has not been."""
    number, config = trainer.state.iteration, trainer.config
    wanted = number in config.evaluate.points(config.iterations)
    return bool(trainer.held_out) and wanted and trainer.state.evaluated < number


def _evaluate(run: Run) -> None:
    """Evaluate, log, keep the clips, and keep the weights if they are the best so far."""
    trainer = run.trainer
    number, state = trainer.state.iteration, trainer.state

    def leave_if_asked() -> None:
        # The last evaluation is finished: there is nothing to come back for.
        if trainer.world.any(run.stop.asked) and number < trainer.config.iterations:
            raise Interrupted

    result = trainer.evaluate(leave_if_asked)
    state.evaluated = number
    seen = run.watch.look_at_clips(result.rows)
    run.metrics.write(number, {**result.metrics, **seen, **trainer.clock.report()})
    run.terminal.evaluation(number, result.metrics)
    run.terminal.failures(result.report)
    if result.report:
        _note(trainer, "failed", result.report)
    if trainer.world.is_main and len(result.clips):
        files = _keep(run, f"heldout-{number:06d}", result.clips, result.captions, result.rows)
        run.metrics.show(number, Clips("held_out", result.clips, result.captions, trainer.model.video.fps, files))
    best = _keep_if_best(run, result.metrics["eval/total"])
    event = EvaluationEvent(number, result.metrics, result.clips, result.captions, best)
    _tell(run, run.hooks.evaluation, event)


def _keep_if_best(run: Run, total: float) -> bool:
    """Write the weights to best/ when no evaluation was better; NaN is never the best, nor is what the sentinel doubts."""
    state = run.trainer.state
    if not total > state.best.get("score", float("-inf")):
        return False
    if state.sentinel.doubts:
        text = (
            f"The held-out total of {total:.4g} after iteration {state.iteration} is the highest so far, but best/ is not taken from it: the "
            f"sentinel doubts it ({', '.join(state.sentinel.doubts)})."
        )
        run.terminal.say(text, style="yellow")
        _note(run.trainer, "best", text)
        return False
    fault = _export(run.trainer, run.out / "best") if state.iteration > 0 else ""
    if fault:
        run.terminal.say(f"The best weights so far could not be written ({fault}). The run goes on.", style="yellow")
        return False
    state.best = {"iteration": state.iteration, "score": total}
    return True


def _resume(trainer: Trainer, out: Path, found: Found, terminal: Terminal) -> int | None:
    """Continue a run that is there; returns the iteration it stands at."""
    folder = out / "checkpoints" / found.checkpoint
    if found.checkpoint:
        trainer.state.load(folder, trainer.world)
    plan = foresee(trainer.config, trainer.planner.plan(0, trainer.state.stream.peek(trainer.config.batch.prompts)))
    terminal.console.print(
        plan_table(
            trainer.config,
            plan,
            dims=trainer.objective.dims,
            clip=trainer.objective.clip,
            device=str(trainer.model.device),
            parameters=trainer.state.size,
            choices=trainer.model.choices if isinstance(trainer.model, Explains) else None,
        )
    )
    if not found.checkpoint:
        return None
    terminal.say(f"Resumed from {folder} at iteration {trainer.state.iteration}.")
    wanted = trainer.config.profile
    if wanted is not None and wanted < trainer.state.iteration:
        terminal.say(
            f"profile {wanted}: that iteration is over, so nothing is recorded. Use {trainer.state.iteration} or more.",
            style="yellow",
        )
    if found.changed:
        terminal.say(f"The run differs from the checkpoint's in: {', '.join(found.changed)}.", style="yellow")
    return trainer.state.iteration


def _recorded(trainer: Trainer, out: Path, found: Found) -> bytes | None:
    """The rows that belong to the checkpoint."""
    if not found.checkpoint:
        return None
    copy = out / "checkpoints" / found.checkpoint / journal.NAME
    if copy.is_file():
        return copy.read_bytes()
    return journal.rows_until(out / journal.NAME, trainer.state.iteration, evaluated=not _due(trainer))
