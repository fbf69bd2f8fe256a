"""The best and the worst clips, dealt out to updates, in several layouts: ranks have different numbers of them, and some none."""

from __future__ import annotations

import dataclasses

import dist_workers as workers
import processes
import pytest
from test_equal_runs import check_same_run

from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.training import config as c

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("deal", ["steps", "clips"])
def test_choosing_is_the_same_run_in_every_layout(deal, checkpoint, tmp_path) -> None:
    config = workers.configure(
        checkpoint("wan_t2v"),
        tmp_path,
        lora=True,
        guidance=1.0,
        batch=c.BatchConfig(prompts=3, group_size=3, micro_batch=1, trained_fraction=0.67),
        rollout=c.RolloutConfig(steps=4),
        update=c.UpdateConfig(updates_per_rollout=2, deal=deal),
    )
    alone = processes.alone(workers.train, config)
    spec = ParallelSpec(timeout=60)
    results = processes.run(workers.train, 2, dataclasses.replace(config, parallel=spec), spec=spec)
    check_same_run(results, alone)
