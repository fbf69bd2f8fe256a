"""`sage-grpo shapes`: pretrain the embedded world's model, distill it to few steps, score a pipeline folder, measure the best score there is, or render clips."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from sage_grpo.cli import worlds
from sage_grpo.cli.worlds import WorldOptions
from sage_grpo.config.ranges import checked
from sage_grpo.worlds.making.shapes.options import DistillOptions, PretrainOptions
from sage_grpo.worlds.world import SHAPES


@checked
class Options(WorldOptions):
    """Options of `sage-grpo shapes`."""

    action: Literal["pretrain", "distill", "score", "ceiling", "render"]
    """What to do: train a model from scratch, make one that needs few steps, judge an existing one, judge clean clips after its VAE (the best that any weights can
    reach), or draw what a perfect model would."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    distill: DistillOptions = field(default_factory=DistillOptions)
    """Options of distilling."""
    out: Path = Path("shapes")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""


def run(options: Options) -> int:
    """Do what `action` says; return the exit status."""
    if options.action == "distill":
        from sage_grpo.worlds.making.shapes.distill import distill

        return distill(options.distill)
    return worlds.run(SHAPES, options)
