"""Several training processes, each with workers of its own: the run of these processes without workers, to the bit."""

from __future__ import annotations

import dist_workers as workers
import numpy as np
import processes
import pytest

from sage_grpo.training import config as c

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*refused")]


def test_two_ranks_with_workers_are_two_ranks_without_and_decide_together(checkpoint, tmp_path) -> None:
    """Ranks with 4 and 5 clips, a group on both; one of rank 1's workers lies, and later none of them can do its job."""
    batch = c.BatchConfig(prompts=3, group_size=3, micro_batch=2)
    optimizer = c.OptimizerConfig(lr=1e-3, eps=1e-4)
    config = workers.configure(
        checkpoint("wan_t2v"), tmp_path, lora=True, guidance=1.0, batch=batch, optimizer=optimizer
    )
    results = processes.run(workers.train_beside_workers, 2, config)
    for result in results:
        assert isinstance(result, dict), result
        for old in (0, 1):
            (alone, weights, _), (rows, others, crew) = result["here", old], result["workers", old]
            assert rows == alone
            assert weights.keys() == others.keys()
            assert all(np.array_equal(weights[name], others[name]) for name in weights)
            assert crew["crew/workers"] == 3
            assert crew["crew/refused"] == 1
            assert crew["crew/gap"] == 0
            assert crew["crew/staleness"] == old
        assert "failed 3 times on workers, the last time on lazy 1" in result["error"]
    fresh, stale = (results[0]["here", old][1] for old in (0, 1))
    assert fresh, "rank 0 has the weights"
    assert not all(np.array_equal(fresh[name], stale[name]) for name in fresh)
