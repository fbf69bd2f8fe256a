"""Signs of life: who is missed, who is not, and ranks that end with the process that started them."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from sage_grpo.cli import main
from sage_grpo.distributed import heartbeat
from sage_grpo.distributed.heartbeat import GONE, SILENT, Beat, Heartbeat


@pytest.mark.parametrize(
    ("count", "age", "lost"),
    [
        ("3", SILENT + 1, True),
        ("3", SILENT - 1, False),  # loading and compiling may take so long
        (GONE, SILENT + 1, False),
        ("0", SILENT + 1, False),  # it never began
    ],
)
def test_who_counts_as_lost(count: str, age: float, lost: bool) -> None:
    beat, told = Heartbeat(0, 3, HashStore(), 5.0), []
    beat.leave = told.append
    beat._seen = {1: Beat(count, "rollout", 100.0 - age), 2: Beat("1", "rollout", 100.0)}
    for _ in range(2):
        beat._check(100.0, paused=False)
    named = "Lost rank 1 (last seen at: rollout)."
    assert [message[: len(named)] for message in told] == ([named] if lost else []), "once, where at all"


def test_a_process_that_was_stopped_itself_blames_nobody(monkeypatch) -> None:
    """After a laptop's sleep everyone's last sign is old."""
    beat, told = Heartbeat(0, 2, HashStore(), 5.0), []
    beat.leave = told.append
    beat._seen[1] = Beat("3", "rollout", 0.0)
    beat._check(1000.0, paused=True)
    assert told == []
    beat._check(1001.0 + SILENT, paused=False)
    assert len(told) == 1
    rounds, looked = [], []
    beat._look, beat._check = lambda: looked.append(1), lambda now, paused: rounds.append(paused)
    times = iter([0.0, 1.0, 2.0 + SILENT / 2, 3.0 + SILENT / 2])
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(beat._stop, "wait", lambda seconds: len(rounds) == 3 and beat._stop.set())
    beat._beat()
    assert (rounds, looked) == ([False, True, False], [1, 1, 1])
    assert beat._store.get("0") == b"3 starting", "every sign is a new one"


def test_signs_are_read_once_all_are_there_and_only_new_ones_count() -> None:
    store = HashStore()
    beat = Heartbeat(0, 3, store, 5.0)
    before = dict(beat._seen)
    store.set("1", "1 rollout of part 2")
    beat._look()
    assert beat._seen == before, "reading would wait for the last one"
    store.set("2", "1 rollout")
    beat._look()
    assert beat._seen[1].where == "rollout of part 2"
    first = dict(beat._seen)
    store.set("2", "2 update")
    beat._look()
    assert beat._seen[1] is first[1]
    assert (beat._seen[2].where, beat._seen[2].count) == ("update", "2")


@pytest.mark.parametrize(
    ("age", "store_lost", "said"),
    [
        (-100.0, None, "All ranks are alive, but one did not arrive in time (rank 1: update). Raise parallel.timeout"),
        (100.0, None, "Lost rank 1 (last seen at: update)."),
        (100.0, 0.0, "Lost rank 1 (last seen at: update)."),
        (0.0, 0.0, "The process that hosts the rendezvous (rank 0, or torchrun on the first node) is gone."),
    ],
)
def test_a_missing_rank_is_named_with_what_it_did_last(age: float, store_lost: float | None, said, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    now = time.monotonic()
    beat = Heartbeat(0, 2, HashStore(), 0.05)
    beat._seen[1] = Beat("3", "update", now - age)
    beat._store_lost = None if store_lost is None else now - store_lost
    assert beat.missing().startswith(said)
    told: list[str] = []
    beat.leave = told.append
    beat._seen[1] = Beat("3", "update", now - 1000)
    beat._check(now, paused=False)
    assert told == [], "the main thread has asked: it ends the process itself"


def test_ranks_leave_together() -> None:
    store = HashStore()
    first, second = (Heartbeat(number, 2, store, 5.0) for number in range(2))
    for beat in (first, second):
        store.set(str(beat.number), "1 rollout")
        beat._thread = threading.Thread()
        beat._thread.start()
    first.stop()
    first.farewell(patience=0.2)
    assert first._seen[1].count == "1"  # looked, and gave up
    waiting = threading.Thread(target=first.farewell, kwargs={"patience": 60.0})
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    second.stop()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_processes_of_one_run_say_the_same_once(monkeypatch, capsys) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(store.port)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert [main.main(["trian"]) for _ in range(2)] == [2, 2]
    assert capsys.readouterr().err.count("There is no command 'trian'.") == 1
    assert main.main(["evaluat"]) == 2
    assert "There is no command 'evaluat'." in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert heartbeat.is_first_to_say("nobody to ask")
    monkeypatch.setattr(heartbeat.os, "_exit", lambda status: print(status))
    Heartbeat(0, 2, HashStore(), 5.0).leave("Lost rank 1.")
    assert capsys.readouterr() == ("1\n", "sage-grpo train stopped: Lost rank 1.\n")
