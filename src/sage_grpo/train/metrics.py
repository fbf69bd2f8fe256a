"""Where metrics go: metrics.jsonl always, TensorBoard by default, Weights & Biases and trackio when asked."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_grpo.train.config import LogConfig


class Sink(Protocol):
    """A place for metrics."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        ...

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Log uint8 clips B x F x H x W x 3."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class Journal:
    """metrics.jsonl: one row per iteration, and one per evaluation. The truth; other sinks are views of it."""

    def __init__(self, file: Path, *, keep_until: int | None, evaluated: bool = True) -> None:
        """Start anew (None), or keep the rows of iterations up to `keep_until` (unless `evaluated`, without its evaluation): what
        came after is computed again."""
        self.file = file
        rows = [] if keep_until is None else [row for row in read_rows(file) if row["iteration"] <= keep_until]
        if not evaluated:
            rows = [row for row in rows if row["iteration"] < (keep_until or 0) or "eval/total" not in row]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, file)
        self._stream = file.open("a")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append a row; on disk before it returns."""
        row = {"iteration": iteration, **{k: _number(v) for k, v in metrics.items()}}
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Videos are files of their own."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a journal; a last line that a kill cut short is left out."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "iteration" in row:
            rows.append(row)
    return rows


class TensorBoard:
    """Scalars, and clips as animated pictures (its own video summary needs another package)."""

    def __init__(self, folder: Path, *, purge_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_from)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Log clips side by side as one animation."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        strip = torch.cat(list(clips), dim=2)
        picture = Summary.Image(
            height=strip.shape[1], width=strip.shape[2], colorspace=3, encoded_image_string=animation(strip, fps)
        )
        self._writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb:
    """Weights & Biases."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project, dir=str(folder), config=dict(config), resume="allow", id=_run_id(folder)
        )

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        self._run.log({**metrics, "iteration": iteration})

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Log clips."""
        videos = [
            self._wandb.Video(clip.permute(0, 3, 1, 2).numpy(), caption=caption, fps=round(fps), format="gif")
            for clip, caption in zip(clips, captions)
        ]
        self._run.log({name: videos, "iteration": iteration})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """trackio, the local-first tracker."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, name=_run_id(folder), config=dict(config), resume="allow")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        self._trackio.log(dict(metrics), step=iteration)

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Videos stay in the run's folder."""

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class Metrics:
    """All sinks of a run as one; ranks other than the first have none."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    @classmethod
    def open(
        cls,
        out: Path,
        log: LogConfig,
        config: Mapping[str, Any],
        *,
        resumed_at: int | None,
        evaluated: bool = True,
    ) -> Metrics:
        """Open the sinks that the configuration names; rows after `resumed_at` (and its evaluation's, unless `evaluated`) are
        dropped."""
        sinks: list[Sink] = [Journal(out / "metrics.jsonl", keep_until=resumed_at, evaluated=evaluated)]
        if log.tensorboard:
            # Also without a checkpoint: a run that was killed before its first one has left events in the folder.
            sinks.append(TensorBoard(out / "tensorboard", purge_from=0 if resumed_at is None else resumed_at + 1))
        if log.wandb is not None:
            sinks.append(_optional("wandb", lambda: Wandb(log.wandb or "", out, config)))
        if log.trackio is not None:
            sinks.append(_optional("trackio", lambda: Trackio(log.trackio or "", out, config)))
        return cls(sinks)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log scalars everywhere."""
        for sink in self.sinks:
            sink.write(iteration, metrics)

    def show(self, iteration: int, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Log clips everywhere."""
        for sink in self.sinks:
            sink.show(iteration, name, clips, captions, fps)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close()


def animation(clip: Tensor, fps: float, *, width: int = 512) -> bytes:
    """A uint8 clip F x H x W x 3 as an animated GIF, small clips enlarged."""
    from PIL import Image

    scale = max(1, width // clip.shape[2])
    frames = [
        Image.fromarray(frame.numpy()).resize((clip.shape[2] * scale, clip.shape[1] * scale), 0) for frame in clip
    ]
    stream = io.BytesIO()
    frames[0].save(stream, format="GIF", save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
    return stream.getvalue()


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def _run_id(folder: Path) -> str:
    return folder.name


def _optional(extra: str, build: Any) -> Sink:
    try:
        return build()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"log.{extra} needs a package that is not installed: pip install 'sage-grpo[{extra}]'."
        ) from error
