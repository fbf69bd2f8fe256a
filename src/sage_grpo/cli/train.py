"""Train a video model with a reward: `sage-grpo train RECIPE` (or FILE.yaml, which may name its `recipe`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sage_grpo.cli import say
from sage_grpo.training.config import TrainConfig as Options

__all__ = ["Options", "run"]


def run(options: Options) -> int:
    from sage_grpo.callbacks.terminal import outliving_output
    from sage_grpo.distributed.checkpoint import SaveFailed
    from sage_grpo.distributed.world import RankLost
    from sage_grpo.rewards.member import RewardFailure
    from sage_grpo.run import session
    from sage_grpo.tools.report.page import leave_report
    from sage_grpo.training.loss import Diverged
    from sage_grpo.workers.messages import WorkerError

    status = 0
    with outliving_output():
        try:
            with session.session(options, remark=say) as world:
                try:
                    session.run(options, world)
                except (Diverged, RewardFailure, SaveFailed, WorkerError) as stopped:  # the same on all ranks
                    if world.is_main:
                        print(f"sage-grpo train stopped: {stopped}")
                    status = 1
        except RankLost as lost:
            print(f"sage-grpo train stopped: {lost}", file=sys.stderr, flush=True)
            os._exit(1)  # an orderly exit would wait for the lost rank
        message = leave_report(Path(options.out)) if world.is_main else ""
        if message:
            print(message)
    return status
