"""Align a video model with a reward. `--recipe NAME` starts from a whole configuration (shapes/sage, hunyuan15/sage, ...)."""

from __future__ import annotations

import os
import sys

from sage_grpo.recipes import recipe, remarks
from sage_grpo.train.config import TrainConfig as Options

__all__ = ["Options", "defaults", "remarks", "run"]


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """What the options start from, and the words without `--recipe NAME`.

    Without a recipe, a file or a model it is the embedded world's recipe, which runs on any machine; with a model or a file,
    the options' own defaults, which are the paper's.
    """
    if "--recipe" in argv:
        at = argv.index("--recipe")
        return recipe(argv[at + 1] if at + 1 < len(argv) else ""), argv[:at] + argv[at + 2 :]
    chosen = any(word.split("=")[0] in ("--config", "--model", "--model.path", "--model.family") for word in argv)
    return (None if chosen else recipe("shapes/sage")), argv


def run(options: Options) -> int:
    """Train."""
    from sage_grpo.parallel.checkpoint import SaveFailed
    from sage_grpo.parallel.world import RankLost, start
    from sage_grpo.rewards.base import RewardFailure
    from sage_grpo.train.runner import train
    from sage_grpo.train.terminal import outliving_output
    from sage_grpo.train.update import Diverged

    with outliving_output():
        world = start(options.parallel, options.model.device)
        try:
            with world.watching():
                status = train(options, world)
        except (Diverged, RewardFailure, SaveFailed) as stopped:  # all ranks decide alike
            if world.is_main:
                print(f"sage-grpo train stopped: {stopped}")
            status = 1
        except RankLost as lost:
            print(f"sage-grpo train stopped: {lost}", file=sys.stderr, flush=True)
            os._exit(1)  # an orderly exit would wait for the rank that is gone
        world.close()
    return status
