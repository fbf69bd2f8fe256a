"""`sage-grpo scenes`: pretrain the second world's model, score a pipeline folder, measure the best score there is, render clips, or train a reward."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from sage_grpo.cli import worlds
from sage_grpo.cli.worlds import WorldOptions
from sage_grpo.config.ranges import checked
from sage_grpo.worlds.making.scenes.options import PretrainOptions
from sage_grpo.worlds.making.scenes.reward_options import RewardOptions
from sage_grpo.worlds.world import SCENES


@checked
class Options(WorldOptions):
    """Options of `sage-grpo scenes`."""

    action: Literal["pretrain", "score", "ceiling", "render", "reward"]
    """What to do: train a model from scratch, judge an existing one, judge clean clips after its VAE (the best that any weights can
    reach), draw what a perfect model would, or train a reward on votes of simulated annotators (`scenes_learned`)."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    reward: RewardOptions = field(default_factory=RewardOptions)
    """Options of training a reward."""
    out: Path = Path("scenes-scores")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""


def run(options: Options) -> int:
    """Do what `action` says; return the exit status."""
    if options.action == "reward":
        from sage_grpo.worlds.making.scenes.reward import train_reward

        return train_reward(options.reward)
    return worlds.run(SCENES, options)
