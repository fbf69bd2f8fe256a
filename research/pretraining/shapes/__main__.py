"""`python -m research.pretraining.shapes`: pretrain the embedded world's model, distill it to few steps, score a pipeline folder, measure the best score there is, or render clips."""

from __future__ import annotations

import sys
from dataclasses import field
from pathlib import Path
from typing import Literal

from research.pretraining import commands
from research.pretraining.commands import WorldOptions
from research.pretraining.shapes.options import DistillOptions, PretrainOptions
from sage_grpo.config.ranges import checked
from sage_grpo.worlds.world import SHAPES


@checked
class Options(WorldOptions):
    """Options of `python -m research.pretraining.shapes`."""

    action: Literal["pretrain", "distill", "score", "ceiling", "render"]
    """The action: train a model from scratch, make one that needs few steps, judge an existing one, judge clean clips after its VAE (the best that any weights can
    reach), or draw what a perfect model would."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    distill: DistillOptions = field(default_factory=DistillOptions)
    """Options of distilling."""
    out: Path = Path("shapes")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""


def run(options: Options) -> int:
    """Run the action; return the exit status."""
    if options.action == "distill":
        from research.pretraining.shapes.distill import distill

        return distill(options.distill)
    return commands.run(SHAPES, options)


if __name__ == "__main__":
    sys.exit(commands.main(Options, run, prog="python -m research.pretraining.shapes", about=__doc__ or ""))
