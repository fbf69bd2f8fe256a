"""Align a video model with a reward. `--recipe NAME` starts from a whole configuration (shapes/sage, hunyuan15/sage, ...)."""

from __future__ import annotations

import os
import sys

from sage_grpo.recipes import recipe
from sage_grpo.train.config import TrainConfig as Options

__all__ = ["Options", "recipe", "run"]


def run(options: Options) -> int:
    """Train."""
    from sage_grpo.parallel.world import RankLost, start
    from sage_grpo.rewards.base import RewardFailure
    from sage_grpo.train.runner import train
    from sage_grpo.train.update import Diverged

    world = start(options.parallel, options.model.device)
    try:
        with world.watching():
            status = train(options, world)
    except (Diverged, RewardFailure) as stopped:  # all ranks decide alike
        if world.is_main:
            print(f"sage-grpo train stopped: {stopped}")
        status = 1
    except RankLost as lost:
        print(f"sage-grpo train stopped: {lost}", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly exit would wait for the rank that is gone
    world.close()
    return status
