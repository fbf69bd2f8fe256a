"""Check this machine, model, reward and configuration before a run: `sage-grpo doctor RECIPE` (or FILE.yaml).

Takes every option of `train`. Samples a few clips, makes one update in memory and writes nothing. Each check prints pass, warn, fail or
skip with the measured value, and what to do about a problem. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from sage_grpo.cli import starting
from sage_grpo.tools.doctor import DoctorSpec
from sage_grpo.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """A training configuration to check."""

    json: bool = False
    """Print JSON only."""
    doctor: DoctorSpec = DoctorSpec()
    """Size of the test rollout."""


def run(options: Options) -> int:
    from rich.console import Console

    from sage_grpo.distributed.world import RankLost
    from sage_grpo.run.session import session
    from sage_grpo.tools.doctor.check import document, show, show_summary
    from sage_grpo.tools.doctor.examine import examine, over_ranks

    config = starting.plain(options)
    try:
        with session(config) as world:
            console = Console(highlight=False, quiet=options.json or not world.is_main)
            found = examine(config, options.doctor, lambda check: show(check, console), world=world)
            elsewhere = over_ranks(found, world)
    except RankLost as lost:
        print(f"sage-grpo doctor stopped: {lost}", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly exit would wait for the lost rank
    for check in elsewhere:
        show(check, console)
    found += elsewhere
    show_summary(found, console)
    if options.json and world.is_main:
        print(json.dumps(document(found), indent=2, allow_nan=False))
    return 1 if any(check.status == "fail" for check in found) else 0
