"""Runs that are not over: each keeps a checkpoint with what is known about it, so that one that is cut off goes on from there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_grpo.documents import read_object
from sage_grpo.parallel import checkpoint
from sage_grpo.training.trainer import Trainer

RECORD = "metrics.jsonl"
"""File of a checkpoint with what is known about the run; the name is one of those that a checkpoint may have."""
EVERY = 60.0
"""Seconds after which a run is kept between two evaluated points too."""


class Unfinished:
    """The place of a run that is under way: a checkpoint of its last point, and the one that its sentinel may go back to."""

    def __init__(self, root: Path, made_by: Mapping[str, Any], tell: Callable[[str], None] = lambda text: None) -> None:
        """`made_by` is all that decides what the run computes, as JSON has it; `tell` gets sentences for people."""
        self.root, self.made_by, self.tell = root, dict(made_by), tell
        self._kept = time.monotonic()

    @property
    def late(self) -> bool:
        """Whether the last point was long ago."""
        return time.monotonic() - self._kept > EVERY

    def keep(self, trainer: Trainer, record: Mapping[str, Any], *, needed: bool) -> None:
        """Save this moment. A full disk ends the run only where its sentinel needs to come back to here."""
        try:
            trainer.save(self.root, {"made_by": self.made_by}, {RECORD: json.dumps(record).encode()})
            trainer.writer.finish()
            checkpoint.prune(self.root, 1, trainer.state.iteration, spare=trainer.state.sentinel.good)
        except (checkpoint.SaveFailed, OSError) as error:
            if needed:
                raise
            self.tell(f"iteration {trainer.state.iteration} could not be kept ({error}). The run goes on.")
        self._kept = time.monotonic()

    def resume(self, trainer: Trainer) -> dict[str, Any] | None:
        """Put the trainer at the last point, to the bit; returns what was known about the run there, None where it starts anew."""
        if not self.root.is_dir():
            return None
        checkpoint.recover(self.root)
        folder = checkpoint.newest_good(self.root)
        fault = "its checkpoints are damaged" if folder is None else self._fault(folder)
        if folder is None or fault:
            self.tell(f"what was kept of it is not continued ({fault}): it is made anew.")
            shutil.rmtree(self.root)
            return None
        trainer.state.load(folder, trainer.world)
        self.tell(f"goes on after iteration {trainer.state.iteration}.")
        return read_object(folder / RECORD)

    def _fault(self, folder: Path) -> str:
        """Why a checkpoint would not lead to what an uninterrupted run computes."""
        meta = checkpoint.read_meta(folder)
        known = meta.get("made_by", {})
        other = [name for name in sorted({*known, *self.made_by}) if known.get(name) != self.made_by.get(name)]
        if other:
            return f"it was made by another {', '.join(other)}"
        with checkpoint.continuing(folder):
            good = meta["sentinel"]["good"]
            good = None if good is None else int(good)
        fault = None if good is None else checkpoint.find_fault(self.root / f"{good:06d}")
        return f"the checkpoint that its sentinel may go back to is damaged: {fault}" if fault else ""
