"""Rehearse a run with random weights of the published sizes: `sage-grpo rehearse RECIPE`.

Takes every option of `train`. Writes model and rewards, runs one iteration, resumes it for a second one, exports the result, loads the
export into stock diffusers, and prints seconds and GiB of each phase beside those of `plan`.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.cli import export, say, starting
from sage_grpo.config.ranges import Folder
from sage_grpo.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """A training configuration, and the size and place of its rehearsal."""

    folder: Folder | None = None
    """New folder that keeps weights, run, export and rehearsal.json; None uses a temporary one, which is removed."""
    small: bool = False
    """Tiny networks, clips of 5 frames of 32 x 32 and at most 2 prompts: a minute on a CPU."""


def run(options: Options) -> int:
    from rich.console import Console

    from sage_grpo.distributed.checkpoint import SaveFailed
    from sage_grpo.rewards.member import RewardFailure
    from sage_grpo.run.session import session
    from sage_grpo.tools.rehearse import rehearsal as rehearse
    from sage_grpo.training.loss import Diverged

    config = starting.plain(options)
    with session(config) as world:
        own = tempfile.mkdtemp(prefix="rehearsal-", dir=".") if options.folder is None and world.is_main else ""
        folder = Path(world.from_main(own) or str(options.folder))
        try:
            rehearsal = rehearse.prepare(config, folder, small=options.small, processes=world.processes)
            rehearsal.check()
            document = rehearse.rehearse(rehearsal, world, _export, say)
        except (Diverged, RewardFailure, SaveFailed) as stopped:  # the same on all ranks
            if world.is_main:
                print(f"sage-grpo rehearse stopped: {stopped}")
            return 1
        finally:
            if own:
                shutil.rmtree(own)
    if document is None:
        return 0
    Console(highlight=False).print(rehearse.table(document))
    print(rehearse.summary(document, None if own else folder))
    return 1 if rehearse.fault(document) else 0


def _export(source: Path, target: Path) -> None:
    with warnings.catch_warnings():
        # An export reads no cache that a run's folder names, and says so; this one is the rehearsal's own.
        warnings.simplefilter("ignore")
        export.run(export.Options(run=str(source), out=str(target)))
