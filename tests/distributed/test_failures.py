"""What happens when something goes wrong on one rank only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dist_workers as workers
import processes
import pytest

from sage_grpo.distributed.spec import ParallelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import KeepConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path):
    return workers.configure(None, tmp_path, iterations=1)


@pytest.mark.parametrize(("lost", "how"), [(2, "stops"), (1, "dies")])
def test_a_rank_that_is_lost_is_noticed_long_before_the_timeout(lost: int, how: str, tmp_path) -> None:
    """The collective would wait for ten minutes."""
    processes.run(workers.stop_a_rank, 3, lost, how, tmp_path, spec=ParallelSpec(timeout=600), limit=60)
    told = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert sorted(told) == [str(rank) for rank in range(3) if rank != lost]
    for message in told.values():
        assert message.startswith(f"Lost rank {lost} (last seen at: iteration 0)"), message
        assert "kill -CONT" in message


def test_a_reward_that_fails_on_one_rank_is_masked_or_stops_the_run_on_all_alike(config) -> None:
    def failing(allowed: float, tried: bool):
        reward = RewardSpec(name="dist_workers:FailsOnRankOne", try_out=tried)
        return replace(config, rewards=[reward], max_failed_fraction=allowed)

    runs = [failing(0.9, tried=True), failing(0.1, tried=False), failing(0.9, tried=False)]
    results = processes.run(workers.failing_reward, 2, runs)
    assert isinstance(results[0], list), results[0]
    assert results[0] == results[1]
    refused, stopped, masked = results[0]
    why = "the judge of rank 1 is down"
    assert f"failed when it was tried out: ConnectionError: {why}" in refused["RewardConfigError"]
    assert "3 of 6 clips" in stopped["RewardFailure"]
    assert why in stopped["RewardFailure"]
    assert masked["failed"] == [3, 3]
    assert why in masked["report"]  # also on the rank that talks to the terminal
    assert masked["eval"][0] == masked["eval"][1] > 0


def test_what_a_callback_raises_in_the_main_process_ends_all_ranks_saved(config) -> None:
    config = replace(config, iterations=3, keep=KeepConfig(checkpoint_every=9))
    main, other = processes.run(workers.handed_over, 2, config)
    assert main == [{"told": [1, 2], "ended": "ZeroDivisionError"}, {"told": [3], "ended": 3}]
    assert other == [{"told": [], "ended": "CallbackFailed"}, {"told": [], "ended": 3}]
    assert [folder.name for folder in (Path(config.out) / "checkpoints").iterdir()] == ["000002", "000003"]
