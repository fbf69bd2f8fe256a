"""Align a video model with a reward. `--recipe NAME` starts from a whole configuration (shapes/sage, hunyuan15/sage, ...)."""

from __future__ import annotations

from sage_grpo.recipes import recipe
from sage_grpo.train.config import TrainConfig as Options

__all__ = ["Options", "recipe", "run"]


def run(options: Options) -> int:
    """Train."""
    from sage_grpo.rewards.base import RewardFailure
    from sage_grpo.train.runner import train
    from sage_grpo.train.update import Diverged

    try:
        return train(options)
    except (Diverged, RewardFailure) as stopped:
        print(f"sage-grpo train stopped: {stopped}")
        return 1
