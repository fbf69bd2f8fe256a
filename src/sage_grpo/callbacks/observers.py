"""Observers of `sage-grpo train`: journal with loggers, terminal and events.jsonl, videos, best weights, callbacks.

They are called in this order (`observers_of`), so that later ones see additions to a row. Most failures of observers
are warnings, and the run continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from sage_grpo.callbacks import journal
from sage_grpo.callbacks.metrics import Metrics, ShownClips, attempt
from sage_grpo.callbacks.terminal import Terminal
from sage_grpo.distributed import checkpoint
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.events import (
    CallbackFailed,
    CheckpointEvent,
    EvaluationEvent,
    Hooks,
    IterationEvent,
    SentinelEvent,
)
from sage_grpo.training.loop import Observer, Saver
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import Sound
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.video import write_mp4

WRITTEN = re.compile(r"(rollout|heldout)-\d{6,}(-\d{2,}\.mp4|\.txt|\.json)")
"""Names of the files that a run writes here."""


class VideoFolder:
    """Writes mp4 files into a folder and deletes the oldest ones when they exceed the budget."""

    def __init__(self, folder: Path, *, megabytes: float) -> None:
        self.folder, self.budget = folder, megabytes * 1e6

    def save(
        self,
        name: str,
        clips: Tensor,
        captions: Sequence[str],
        fps: float,
        rows: Sequence[Mapping[str, Any]] = (),
        sound: Sound | None = None,
    ) -> list[Path]:
        """Write clips as <name>-<index>.mp4, their prompts as <name>.txt, and for a report `rows` (see `Evaluation.rows`) as
        <name>.json; returns the clips' files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{name}-{index:02d}.mp4" for index in range(len(clips))]
        for place, (file, clip) in enumerate(zip(files, clips)):
            write_mp4(file, clip, fps, sound=None if sound is None else sound[place])
        text = "".join(f"{' '.join(caption.split())}\n" for caption in captions)  # one line per caption
        replace_text(self.folder / f"{name}.txt", text)
        if rows:
            frames, height, width = clips.shape[1:4]
            named = [{**row, "clip": None if row["clip"] is None else files[row["clip"]].name} for row in rows]
            index = {"fps": fps, "frames": frames, "height": height, "width": width, "rows": named}
            text = json.dumps({**index, "sound": sound is not None}, ensure_ascii=False)
            replace_text(self.folder / f"{name}.json", text)
        self.prune()
        return files

    def prune(self) -> None:
        """Delete the oldest files until the rest fits the budget: rollouts before held-out clips, and last the clips before
        training. Other files stay, and do not count."""

        def worth(file: Path) -> tuple[int, int, str]:
            kind = 2 if file.name.startswith("heldout-000000") else int(file.name.startswith("heldout"))
            return kind, file.stat().st_mtime_ns, file.name

        written = [file for file in self.folder.iterdir() if WRITTEN.fullmatch(file.name) and file.is_file()]
        files = sorted(written, key=worth)
        total = sum(file.stat().st_size for file in files)
        while files and total > self.budget:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()


def _place(row: Mapping[str, Any]) -> int:
    return -1 if row["clip"] is None else int(row["clip"])


def note(trainer: Trainer, kind: str, text: str) -> None:
    """Write an event into the run's events.jsonl; a failure is only a warning."""
    out = Path(trainer.config.out)
    if trainer.world.is_main:
        attempt(f"Writing to {out / journal.EVENTS}", lambda: journal.note(out, kind, trainer.state.iteration, text))


@dataclass(frozen=True)
class MetricsWriter(Observer):
    """Writes metrics.jsonl and the loggers, then the terminal, and events.jsonl."""

    trainer: Trainer
    metrics: Metrics
    terminal: Terminal

    def after(self, row: dict[str, float]) -> None:
        number = self.trainer.state.iteration
        self.metrics.write(number, row)
        self.terminal.iteration(number, row)
        self._report(self.trainer.scores.report)

    def evaluated(self, found: Evaluation) -> None:
        number = self.trainer.state.iteration
        self.metrics.write(number, found.metrics | found.extra)
        self.terminal.evaluation(number, found.metrics)
        self._report(found.report)

    def health_event(self, event: SentinelEvent) -> None:
        text = f"{event.name}: {event.text}" if event.action == "warn" else event.text
        self.terminal.say(f"sentinel: {text}", style="yellow")
        note(self.trainer, "sentinel", text)

    def _report(self, failures: str) -> None:
        """Print failures of rewards below the limit at which a run stops."""
        if failures:
            self.terminal.say(failures, style="yellow")
            note(self.trainer, "failed", failures)


@dataclass(frozen=True)
class VideoSaver(Observer):
    """Saves clips of rollouts and evaluations as mp4 files, and logs those of evaluations."""

    trainer: Trainer
    samples: VideoFolder
    metrics: Metrics

    def shows(self, number: int) -> bool:
        trainer, every, number = self.trainer, self.trainer.config.keep.videos_every, number + 1
        return trainer.world.is_main and bool(every) and (number % every == 0 or number == trainer.config.iterations)

    def after(self, row: dict[str, float]) -> None:
        clips, most, number = self.trainer.clips, self.trainer.config.keep.videos, self.trainer.state.iteration
        if self.shows(number - 1) and len(clips.videos):
            sound = None if clips.sound is None else clips.sound[:most]
            self._save(f"rollout-{number:06d}", clips.videos[:most], clips.captions[:most], (), sound)

    def evaluated(self, found: Evaluation) -> None:
        trainer, number = self.trainer, self.trainer.state.iteration
        if trainer.world.is_main and len(found.clips):
            files = self._save(f"heldout-{number:06d}", found.clips, found.captions, found.rows, found.sound)
            fps = trainer.model.video.fps
            scores = [row["scores"] for row in sorted(found.rows, key=_place) if row["clip"] is not None]
            self.metrics.show(number, ShownClips("held_out", found.clips, found.captions, fps, files, scores))

    def _save(self, name: str, clips: Tensor, captions: Sequence[str], *content: Any) -> list[Path]:
        """Save clips, captions, rows and sound; a full disk is only a warning."""
        files: list[Path] = []
        save = partial(self.samples.save, name, clips, captions, self.trainer.model.video.fps, *content)
        attempt(f"Saving videos to {self.samples.folder}", lambda: files.extend(save()))
        return files


@dataclass(frozen=True)
class BestWeightsSaver(Observer):
    """Writes best/: the weights of the best evaluation so far, except NaN scores and those that the sentinel doubts."""

    trainer: Trainer
    terminal: Terminal
    folder: Path

    def evaluated(self, found: Evaluation) -> None:
        state, total = self.trainer.state, found.metrics["eval/total"]
        if not total > state.best.get("score", float("-inf")):
            return
        if state.sentinel.doubts:
            text = (
                f"The held-out total of {total:.4g} after iteration {state.iteration} is the highest so far, but best/ is not taken from it: the "
                f"sentinel warned ({', '.join(state.sentinel.doubts)})."
            )
            self.terminal.say(text, style="yellow")
            note(self.trainer, "best", text)
            return
        fault = export(self.trainer, self.folder) if state.iteration > 0 else ""
        if fault:
            text = f"The best weights so far could not be written ({fault}). The run continues."
            self.terminal.say(text, style="yellow")
            return
        state.best = {"iteration": state.iteration, "score": total}
        found.best = True


@dataclass(frozen=True)
class UserCallbacks(Observer):
    """Calls functions of a program in the main process; an exception ends the run on all ranks after saving."""

    trainer: Trainer
    hooks: Hooks
    saver: CheckpointSaver

    def shows(self, number: int) -> bool:
        return self.hooks.iteration is not None

    def after(self, row: dict[str, float]) -> None:
        trainer = self.trainer
        event = IterationEvent(trainer.state.iteration, row, trainer.clips.videos, trainer.clips.captions)
        self._call(self.hooks.iteration, event)

    def evaluated(self, found: Evaluation) -> None:
        event = EvaluationEvent(self.trainer.state.iteration, found.metrics, found.clips, found.captions, found.best)
        self._call(self.hooks.evaluation, event)

    def saved(self, folder: Path) -> None:
        self._call(self.hooks.checkpoint, CheckpointEvent(self.trainer.state.iteration, folder))

    def health_event(self, event: SentinelEvent) -> None:
        self._call(self.hooks.sentinel, event)

    def _call(self, hook: Callable[[Any], object] | None, event: Any) -> None:
        trainer, raised = self.trainer, None
        if hook is None:
            return
        if trainer.world.is_main:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001 - users' code may raise anything, and the other ranks wait
                raised = error
        if trainer.world.any(raised is not None):
            if trainer.state.iteration > 0 and not isinstance(event, CheckpointEvent):
                self.saver.save(needed=False)
            raise raised or CallbackFailed("A callback of the main process raised; its own message has the traceback.")


@dataclass(frozen=True)
class CheckpointSaver(Saver):
    """Saves the run: weights and all other state for resuming, with the journal's rows so far."""

    trainer: Trainer
    root: Path
    identity: dict[str, str]
    metrics: Metrics

    def due(self, number: int, *, last: bool, stopping: bool) -> bool:
        return last or stopping or number % self.trainer.config.keep.checkpoint_every == 0

    def save(self, *, needed: bool) -> Path:
        folder = self.trainer.save(self.root, {"identity": self.identity}, {journal.METRICS: self.metrics.rows})
        self.prune()
        return folder

    def prune(self) -> None:
        if self.trainer.world.is_main:
            keep, state = self.trainer.config.keep.checkpoints, self.trainer.state
            checkpoint.prune(self.root, keep, state.iteration, spare=state.sentinel.good)


def export(trainer: Trainer, folder: Path) -> str:
    """Write weights; returns an error of the main process's files, on all ranks."""
    fault = ""
    try:
        trainer.export(folder)
    except (OSError, SafetensorError) as error:  # only the main process writes
        fault = f"{type(error).__name__}: {error}"
        trainer.world.barrier()  # the others wait at this barrier
    return trainer.world.from_main(fault)


def observers_of(
    trainer: Trainer, metrics: Metrics, terminal: Terminal, samples: VideoFolder, hooks: Hooks, saver: CheckpointSaver
) -> list[Observer]:
    """The observers of a run, in the order of their calls."""
    return [
        MetricsWriter(trainer, metrics, terminal),
        VideoSaver(trainer, samples, metrics),
        BestWeightsSaver(trainer, terminal, Path(trainer.config.out) / "best"),
        UserCallbacks(trainer, hooks, saver),
    ]
