"""`python -m research.pretraining.scenes`: pretrain the second world's model, score a pipeline folder, measure the best score there is, render clips, or train a reward."""

from __future__ import annotations

import sys
from dataclasses import field
from pathlib import Path
from typing import Literal

from research.pretraining import commands
from research.pretraining.commands import WorldOptions
from research.pretraining.scenes.options import PretrainOptions
from research.pretraining.scenes.reward_options import RewardOptions
from research.scenes.world import SCENES
from sage_grpo.config.ranges import checked


@checked
class Options(WorldOptions):
    """Options of `python -m research.pretraining.scenes`."""

    action: Literal["pretrain", "score", "ceiling", "render", "reward"]
    """The action: train a model from scratch, judge an existing one, judge clean clips after its VAE (the best that any weights can
    reach), draw what a perfect model would, or train a reward on votes of simulated annotators (`scenes_learned`)."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    reward: RewardOptions = field(default_factory=RewardOptions)
    """Options of training a reward."""
    out: Path = Path("scenes-scores")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""


def run(options: Options) -> int:
    """Run the action; return the exit status."""
    if options.action == "reward":
        from research.pretraining.scenes.reward import train_reward

        return train_reward(options.reward)
    return commands.run(SCENES, options)


if __name__ == "__main__":
    sys.exit(commands.main(Options, run, prog="python -m research.pretraining.scenes", about=__doc__ or ""))
