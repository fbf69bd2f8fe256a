"""A run from start to end: resume, log, evaluate, checkpoint, and stop cleanly when asked to."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.world import World
from sage_grpo.train.clock import Clock
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.metrics import Metrics
from sage_grpo.train.samples import Samples
from sage_grpo.train.terminal import Terminal, plan_table
from sage_grpo.train.trainer import Trainer


class StopRequest:
    """Set by SIGTERM or SIGINT; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch the signals while inside."""

        def note(number: int, frame: Any) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Interrupted(Exception):
    """A stop was asked for during an evaluation, which the continued run will do again."""


def train(config: TrainConfig, world: World | None = None) -> int:
    """Run `sage-grpo train`; returns the exit status."""
    world = world or World()
    out = Path(config.out)
    terminal = Terminal(enabled=world.is_main, progress=config.log.progress, total=config.iterations)

    def listen(phase: str, done: int, total: int) -> None:
        world.note(f"{phase} {done}/{total}")
        terminal.listen(phase, done, total)

    trainer = Trainer(config, world, Clock(listen))
    resumed = _resume(trainer, out, terminal)
    if world.is_main:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / "config.yaml", yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False))
    metrics = (
        Metrics.open(
            out,
            config.log,
            dataclasses.asdict(config),
            resumed_at=resumed,
            evaluated=not _due(trainer),
        )
        if world.is_main
        else Metrics([])
    )
    try:
        with StopRequest().listening() as stop, terminal:
            trainer.encode_prompts()
            return _loop(trainer, out, metrics, terminal, stop)
    finally:
        metrics.close()


def _loop(trainer: Trainer, out: Path, metrics: Metrics, terminal: Terminal, stop: StopRequest) -> int:
    samples = Samples(out / "videos", megabytes=trainer.config.keep.video_megabytes)
    terminal.start_at(trainer.state.iteration)
    try:
        stopped = _iterate(trainer, out, metrics, samples, terminal, stop)
    except Interrupted:
        if trainer.state.iteration > 0:
            _save(trainer, out)
        stopped = True
    trainer.writer.finish()
    if stopped:
        number = trainer.state.iteration
        where = f"after iteration {number}; saved" if number else "before the first iteration"
        terminal.say(f"Stopped by signal {where}. The same command continues from here.")
        return 0
    trainer.export(out / "final")
    terminal.say(f"Done. Weights: {out / 'final'}   metrics: {out / 'metrics.jsonl'}   videos: {out / 'videos'}")
    return 0


def _iterate(
    trainer: Trainer, out: Path, metrics: Metrics, samples: Samples, terminal: Terminal, stop: StopRequest
) -> bool:
    """Iterations, evaluations and checkpoints; returns whether a signal ended them."""
    config, state, world = trainer.config, trainer.state, trainer.world
    if _due(trainer):  # the first, or one that a stop cut short
        _evaluate(trainer, out, metrics, samples, terminal, stop)
    while state.iteration < config.iterations:
        row = trainer.step()
        number, last = state.iteration, state.iteration == config.iterations
        metrics.write(number, row)
        terminal.iteration(number, row)
        terminal.failures(trainer.failures)
        if world.is_main and config.keep.videos_every and (number % config.keep.videos_every == 0 or last):
            count = config.keep.videos
            samples.save(
                f"rollout-{number:06d}", trainer.videos[:count], trainer.captions[:count], trainer.model.video.fps
            )
        if _due(trainer):
            _evaluate(trainer, out, metrics, samples, terminal, stop)
        stopping = world.any(stop.signal is not None)
        if last or stopping or number % config.keep.checkpoint_every == 0:
            _save(trainer, out)
        if stopping and not last:
            return True
    return False


def _save(trainer: Trainer, out: Path) -> None:
    trainer.save(out / "checkpoints")
    if trainer.world.is_main:
        checkpoint.prune(out / "checkpoints", trainer.config.keep.checkpoints)


def _due(trainer: Trainer) -> bool:
    """Whether this iteration is to be evaluated and has not been."""
    number, config = trainer.state.iteration, trainer.config
    wanted = number in (0, config.iterations) or (config.evaluate.every and number % config.evaluate.every == 0)
    return bool(trainer.held_out and wanted and trainer.state.evaluated < number)


def _evaluate(
    trainer: Trainer, out: Path, metrics: Metrics, samples: Samples, terminal: Terminal, stop: StopRequest
) -> None:
    """Evaluate, log, keep the clips, and keep the weights if they are the best so far."""
    number, state = trainer.state.iteration, trainer.state

    def leave_if_asked() -> None:
        # The last evaluation is finished: there is nothing to come back for.
        if trainer.world.any(stop.signal is not None) and number < trainer.config.iterations:
            raise Interrupted

    result = trainer.evaluate(leave_if_asked)
    state.evaluated = number
    metrics.write(number, {**result.metrics, **trainer.clock.report()})
    terminal.evaluation(number, result.metrics)
    terminal.failures(result.report)
    if trainer.world.is_main and len(result.clips):
        fps = trainer.model.video.fps
        metrics.show(number, "held_out", result.clips, result.captions, fps)
        samples.save(f"heldout-{number:06d}", result.clips, result.captions, fps)
    total = result.metrics["eval/total"]
    if total == total and total > state.best.get("score", float("-inf")):  # NaN is never the best
        state.best = {"iteration": number, "score": total}
        if number > 0:
            trainer.export(out / "best")


def _resume(trainer: Trainer, out: Path, terminal: Terminal) -> int | None:
    """Continue a run that is there; returns the iteration it stands at."""
    mode, root = trainer.config.resume, out / "checkpoints"
    found = trainer.resume(root) if mode != "never" else None
    if mode == "never" and root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"{out} holds checkpoints of another run. Choose another `out`, or resume: auto to continue it."
        )
    if mode != "never" and found is None and any(root.glob("[0-9]*")):
        # Starting anew would overwrite the metrics of a run whose checkpoints someone may still be able to repair.
        raise checkpoint.CheckpointError(
            f"{root} has checkpoints, but every checkpoint there is damaged (see the warnings). Restore one from a copy, or "
            "choose another `out` to start anew."
        )
    if mode == "must" and found is None:
        raise FileNotFoundError(f"resume: must, but {root} holds no usable checkpoint.")
    plan = trainer.planner.plan(0, trainer.state.stream.peek(trainer.config.batch.prompts))
    terminal.console.print(plan_table(trainer.config, plan, dims=trainer.objective.dims, clip=trainer.objective.clip))
    if found is None:
        return None
    terminal.say(f"Resumed from {found} at iteration {trainer.state.iteration}.")
    changed = _differences(checkpoint.read_meta(found)["config"], _plain(dataclasses.asdict(trainer.config)))
    if changed:
        terminal.say(f"[yellow]The configuration differs from the checkpoint's in: {', '.join(changed)}.[/yellow]")
    return trainer.state.iteration


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            key
            for name in {**old, **new}
            if name not in ("resume", "log")
            for key in _differences(old.get(name), new.get(name), f"{prefix}{name}.")
        ]
    return [] if old == new else [prefix.rstrip(".")]


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
