"""What happens when something goes wrong on one rank only."""

from __future__ import annotations

import dataclasses
import re
import threading
import time

import dist_workers as workers
import processes
import pytest
from torch.distributed import HashStore

from sage_grpo.parallel.heartbeat import Beat, Heartbeat, condition_of, own_place
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import KeepConfig

pytestmark = pytest.mark.slow

TIMEOUT = 8.0


@pytest.fixture(scope="module")
def config(checkpoint, tmp_path_factory):
    return workers.configure(
        checkpoint("wan_t2v"), tmp_path_factory.mktemp("failures"), guidance=1.0, lora=True, iterations=1
    )


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_others_stop_in_time_and_name_the_rank(how: str, config) -> None:
    spec = ParallelSpec(timeout=TIMEOUT)
    results = processes.run(workers.lose_a_rank, 3, config, how, spec=spec, limit=120)
    survivors = [results[0], results[2]]
    if how == "dies":
        assert results[1] is None
    for message in survivors:
        assert message.startswith("RankLost"), message
        seconds = int(re.search(r"after (\d+) s", message)[1])
        assert seconds < 3 * TIMEOUT + 10
    if how == "dies":
        for message in survivors:
            assert "Lost rank 1" in message, message
    else:
        assert any(re.search(r"Ranks? 1 failed to pass", message) or "rank 1" in message for message in survivors)


@pytest.mark.parametrize(("lost", "how"), [(1, "stops"), (0, "stops"), (1, "dies")])
def test_a_rank_that_is_lost_is_noticed_long_before_the_timeout(lost: int, how: str, tmp_path) -> None:
    """The collective would wait for ten minutes."""
    processes.run(workers.stop_a_rank, 3, lost, how, tmp_path, spec=ParallelSpec(timeout=600), limit=60)
    told = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert sorted(told) == [str(rank) for rank in range(3) if rank != lost]
    condition = "stopped" if how == "stops" else "dead"
    for message in told.values():
        assert message.startswith(f"Lost rank {lost} ({condition}; last seen at: iteration 0)"), message
        assert "kill -CONT" in message


def test_a_rank_that_left_in_good_order_is_not_missed(tmp_path) -> None:
    workers_left = processes.run(workers.stop_a_rank, 2, 1, "leaves", tmp_path, spec=ParallelSpec(timeout=600))
    assert workers_left == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_only_processes_of_this_machine_are_looked_at() -> None:
    assert condition_of(own_place()) == ""
    machine = own_place().rpartition(":")[0]
    assert condition_of(f"{machine}:{2**22 + 1}") == "dead"  # above the largest number of a process
    assert condition_of("another/machine:1") is None
    assert condition_of(":1") is None


def test_ranks_leave_together() -> None:
    """The first to end waits for the last word of the other, but not for one that never gives it."""
    store = HashStore()
    first, second = (Heartbeat(number, 2, store, 5.0) for number in range(2))
    for beat in (first, second):
        store.set(str(beat.number), f"1 {own_place()} rollout")
        beat._threads = []  # they were never started
    first.stop()
    first.farewell(patience=0.2)
    assert first._seen[1].count == "1"  # looked, and gave up
    waiting = threading.Thread(target=first.farewell, kwargs={"patience": 60.0})
    waiting.start()
    waiting.join(timeout=0.3)
    assert waiting.is_alive()
    second.stop()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    """After a laptop's sleep everyone's last sign is old."""
    beat = Heartbeat(0, 2, HashStore(), 5.0)
    told: list[str] = []
    beat.leave = told.append
    machine = own_place().rpartition(":")[0]
    beat._seen[1] = Beat("3", "rollout", time.monotonic() - 1000, f"{machine}:{2**22 + 1}")
    beat._forgive()
    beat._check()
    assert told == []
    beat._seen[1] = dataclasses.replace(beat._seen[1], time=time.monotonic() - 1000)
    beat._check()
    beat._check()
    assert len(told) == 1


def failing(config, allowed: float, tried: bool = False):
    reward = RewardSpec(name="dist_workers:FailsOnRankOne", try_out=tried)
    return dataclasses.replace(config, rewards=[reward], max_failed_fraction=allowed)


def test_a_reward_that_fails_on_one_rank_is_masked_on_all(config) -> None:
    results = processes.run(workers.failing_reward, 2, failing(config, 0.9))
    assert all(isinstance(result, dict) for result in results), results
    assert results[0] == results[1]
    assert results[0]["failed"] == results[0]["by_reward"] == 3
    assert "the judge of rank 1 is down" in results[0]["report"]  # also on the rank that talks to the terminal
    assert results[0]["eval_failed"] == results[0]["eval_by_reward"] > 0


def test_a_reward_that_fails_too_often_stops_all_ranks_alike(config) -> None:
    results = processes.run(workers.failing_reward, 2, failing(config, 0.1))
    for result in results:
        assert isinstance(result, dict), result
        assert "3 of 6 clips" in result["stopped"]
        assert "judge of rank 1 is down" in result["stopped"]


def test_a_reward_that_fails_on_one_rank_when_it_is_tried_out_stops_all_ranks_alike(config) -> None:
    results = processes.run(workers.failing_reward, 2, failing(config, 0.9, tried=True))
    for result in results:
        assert isinstance(result, dict), result
        assert "failed when it was tried out: ConnectionError: the judge of rank 1 is down" in result["refused"]


def test_what_a_callback_raises_in_the_main_process_ends_all_ranks_saved(config, tmp_path) -> None:
    config = dataclasses.replace(config, out=str(tmp_path), iterations=3, keep=KeepConfig(checkpoint_every=9))
    main, other = processes.run(workers.handed_over, 2, config, True)
    assert main == {"told": [1, 2], "ended": "ZeroDivisionError"}
    assert other == {"told": [], "ended": "CallbackFailed"}
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["000002"]
    main, other = processes.run(workers.handed_over, 2, config, False)
    assert (main, other) == ({"told": [3], "ended": 3}, {"told": [], "ended": 3})
