"""Signs of life: who is missed, who is not, and ranks that end with the process that started them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from sage_grpo.cli import main
from sage_grpo.distributed import heartbeat
from sage_grpo.distributed.heartbeat import GONE, Beat, Heartbeat, condition_of, own_place

MACHINE = own_place().rpartition(":")[0]
DEAD = f"{MACHINE}:{2**22 + 1}"
"""Above the largest number of a process."""


def test_only_processes_of_this_machine_are_looked_at() -> None:
    assert condition_of(own_place()) == ""
    assert condition_of(DEAD) == "dead"
    assert condition_of("another/machine:1") is None
    assert condition_of(":1") is None


def watching(ranks: int) -> tuple[Heartbeat, list[str]]:
    beat, told = Heartbeat(0, ranks, HashStore(), 5.0), []
    beat.leave = told.append
    return beat, told


@pytest.mark.parametrize(
    ("count", "place", "age", "lost"),
    [
        ("3", "dead", 100.0, "dead"),
        ("3", "dead", 1.0, ""),  # it may be a beat that is on its way
        ("3", "elsewhere", 100.0, "silent"),
        ("3", "elsewhere", 30.0, ""),  # loading and compiling may take so long
        ("3", "alive", 100.0, ""),
        (GONE, "dead", 100.0, ""),
        ("3", "unknown", 100.0, ""),  # it never said where it is
    ],
)
def test_who_counts_as_lost(count: str, place: str, age: float, lost: str) -> None:
    places = {"dead": DEAD, "elsewhere": "another/machine:1", "alive": own_place(), "unknown": ""}
    beat, told = watching(3)
    beat._seen[2] = Beat("1", "rollout", time.monotonic() - 100.0, own_place())
    beat._seen[1] = Beat(count, "rollout", time.monotonic() - age, places[place])
    beat._check()
    beat._check()
    named = f"Lost rank 1 ({lost}; last seen at: rollout)."
    assert [message[: len(named)] for message in told] == ([named] if lost else []), "once, where at all"
    if place == "elsewhere":
        beat, told = watching(2)
        beat._seen[1] = Beat(count, "rollout", time.monotonic() - 100.0, places[place])
        beat._heard = time.monotonic() - 100.0
        beat._check()
        assert told == [], "who does not hear the store takes nobody for silent"


def test_a_process_that_was_stopped_itself_blames_nobody(monkeypatch) -> None:
    """After a laptop's sleep everyone's last sign is old."""
    beat, told = watching(2)
    beat._seen[1] = Beat("3", "rollout", time.monotonic() - 1000, DEAD)
    beat._forgive()
    beat._check()
    assert told == []
    beat._seen[1] = dataclasses.replace(beat._seen[1], time=time.monotonic() - 1000)
    beat._check()
    assert len(told) == 1
    for step, forgiven in ((2 * heartbeat.STILL + 1, 2), (2 * heartbeat.STILL - 1, 0)):
        clock, done = itertools.count(0, step), []
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda clock=clock: next(clock)))
        beat._stop = SimpleNamespace(wait=lambda seconds, ends=[True, False, False]: ends.pop())
        beat._forgive, beat._check = partial(done.append, "forgive"), partial(done.append, "check")
        beat._watch()
        assert (done.count("forgive"), done.count("check")) == (forgiven, 2)


def test_signs_are_read_once_all_are_there_and_only_new_ones_count() -> None:
    store = HashStore()
    beat = Heartbeat(0, 3, store, 5.0)
    before = dict(beat._seen)
    store.set("1", "1 here:5 rollout of part 2")
    beat._look()
    assert beat._seen == before, "reading would wait for the last one"
    store.set("2", "1 there:6 rollout")
    beat._look()
    assert (beat._seen[1].where, beat._seen[1].place) == ("rollout of part 2", "here:5")
    first = dict(beat._seen)
    store.set("2", "2 there:6 update")
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
    beat._seen[1] = Beat("3", "update", now - age, own_place())
    beat._store_lost = None if store_lost is None else now - store_lost
    assert beat.missing().startswith(said)
    told: list[str] = []
    beat.leave = told.append
    beat._seen[1] = Beat("3", "update", now - 1000, DEAD)
    beat._check()
    assert told == [], "the main thread has asked: it ends the process itself"


def test_ranks_leave_together() -> None:
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
