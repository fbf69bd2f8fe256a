"""Votes on the disk: none lost when the process is killed, none counted twice, tokens only as hashes."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sage_grpo.tools.study.making import invite
from sage_grpo.tools.study.pairs import Shown, Task
from sage_grpo.tools.study.results import raters, to_csv
from sage_grpo.tools.study.store import NoSuchTask, OtherVote, Store, StudyError, Vote
from studies import created, study

ANSWERS = {"quality": "left"}
VOTER = """
import sys
from pathlib import Path
from sage_grpo.tools.study.store import Store
store = Store(Path(sys.argv[1]))
rater = store.rater_of(sys.argv[2])
while asked := store.ask(rater):
    store.vote(rater, asked[0].name, asked[0].name[:16].encode().hex(), {"quality": "left"})
    print(asked[0].name, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(created(tmp_path / "study.sqlite", study())) as opened:
        yield opened


def test_a_vote_counts_once_however_often_it_is_sent(store: Store) -> None:
    rater, _ = invite(store)
    name = store.ask(rater)[0].name
    assert store.vote(rater, name, "n1", ANSWERS)
    assert not store.vote(rater, name, "n1", ANSWERS)
    for nonce, answers in (("n2", ANSWERS), ("n1", {"quality": "tie"})):
        with pytest.raises(OtherVote):
            store.vote(rater, name, nonce, answers)
    following = store.ask(rater)[0].name
    assert following != name
    with pytest.raises(OtherVote, match="nonce"):
        store.vote(rater, following, "n1", ANSWERS)
    other, later = invite(store)[0], store.ask(rater)[1].name
    for voter, task in ((other, following), (rater, later), (rater, "nothing")):  # only the own that was shown
        with pytest.raises(NoSuchTask):
            store.vote(voter, task, "n", ANSWERS)
    assert [vote.answers for vote in store.votes()] == [ANSWERS]
    assert store.progress()[rater] == (1, 9)


def test_each_side_shows_its_own_clip(store: Store) -> None:
    rater, _ = invite(store)
    while asked := store.ask(rater):
        store.vote(rater, asked[0].name, asked[0].name, ANSWERS)
        shown = store.votes()[-1].task
        for name, side in ((asked[0].left, shown.left), (asked[0].right, shown.right)):
            assert store.clip(name) == f"{shown.prompt}-{side.method}-False.mp4"
    assert len(store.votes()) == 9
    assert store.clip("nothing") is None


def test_one_vote_of_many_threads_counts(store: Store) -> None:
    rater, _ = invite(store)
    name = store.ask(rater)[0].name
    outcomes: list[str] = []

    def vote(number: int) -> None:
        try:
            outcomes.append(str(store.vote(rater, name, f"n{number % 4}", ANSWERS)))
        except OtherVote:
            outcomes.append("other")

    threads = [threading.Thread(target=vote, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("True"), outcomes.count("False"), outcomes.count("other")) == (1, 3, 12)


@pytest.mark.slow
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "study.sqlite"
    with contextlib.closing(created(file, study(prompts=100))) as store:
        _, token = invite(store)
    told: list[str] = []
    for stop in (7, 20):
        with subprocess.Popen(
            [sys.executable, "-c", VOTER, str(file), token], stdout=subprocess.PIPE, text=True
        ) as voter:
            assert voter.stdout is not None
            told += [voter.stdout.readline().strip() for _ in range(stop)]
            os.kill(voter.pid, signal.SIGKILL)
            told += voter.stdout.read().split()  # acknowledged before the end came
    with contextlib.closing(Store(file)) as store:
        names = dict(store._read("SELECT place, name FROM tasks"))
        stored = [names[vote.place] for vote in store.votes()]
        assert store._read("PRAGMA integrity_check") == [("ok",)]
        assert store._read("PRAGMA journal_mode") == [("wal",)]
        assert store._read("PRAGMA synchronous") == [(2,)]
    assert len(set(stored)) == len(stored)
    assert len(set(told)) == len(told)  # the second voter went on after the first
    assert set(told) <= set(stored)
    assert len(stored) <= len(told) + 2  # a vote may be stored whose answer did not get out: one for each kill


def test_tokens_are_kept_as_hashes_only(store: Store, tmp_path: Path) -> None:
    rater, token = invite(store)
    admin = store.renew(None)
    assert store.rater_of(token) == rater
    assert store.is_admin(admin)
    assert store.rater_of(admin) is None
    assert not store.is_admin(token)
    renewed = store.renew(rater)
    assert store.rater_of(token) is None
    assert store.rater_of(renewed) == rater
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [one for one in (token, admin, renewed) if one.encode() in content]
    with pytest.raises(StudyError, match="no rater 7: this study has 1"):
        store.renew(7)


def test_answer_times_begin_when_a_task_is_first_shown(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rater, _ = invite(store)
    now = [1000.0]
    monkeypatch.setattr("sage_grpo.tools.study.store.time.time", lambda: now[0])
    first, second = store.ask(rater)
    now[0] += 40
    assert store.ask(rater)[0] == first
    now[0] += 20
    store.vote(rater, first.name, "n1", ANSWERS)
    now[0] += 5
    assert store.ask(rater)[0] == second
    now[0] += 7
    store.vote(rater, second.name, "n2", ANSWERS)
    assert [(vote.shown, vote.voted - vote.shown) for vote in store.votes()] == [(1000.0, 60.0), (1065.0, 7.0)]
    assert raters(store, store.votes())[0]["seconds"] == 33.5
    assert [line.split(",")[-1] for line in to_csv(store).splitlines()[1:]] == ["60.000", "7.000"]


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_in_the_table_of_votes_is_a_formula(first: str, tmp_path: Path) -> None:
    evil, shown = f"{first}HYPERLINK(1)\r=A1", f"'{first}HYPERLINK(1)\r=A1".replace("\r", " ")
    made = replace(study(1, 2, dimensions={evil: "Which?"}), methods=[evil, "m1"], prompts=[evil])
    with contextlib.closing(created(tmp_path / "study.sqlite", made)) as store:
        rater, _ = invite(store)
        store.vote(rater, store.ask(rater)[0].name, "n", {evil: "left"})
        (row,) = csv.DictReader(io.StringIO(to_csv(store), newline=""))
    assert row["prompt"] == row["dimension"] == shown
    assert {row["left"], row["right"]} == {shown, "m1"}
    assert row["preferred"] == row["left"]


@pytest.mark.parametrize(
    ("failed", "limit", "flagged"), [(1, 0.25, False), (2, 0.25, True), (0, 0.0, False), (1, 0.0, True)]
)
def test_who_fails_more_than_the_limit_is_flagged_and_who_is_at_it_is_not(failed: int, limit: float, flagged) -> None:
    """Four checks, each a clip with itself: a tie passes."""
    task = Task(0, Shown(0), Shown(0))
    votes = [
        Vote(rater=1, place=n, task=task, answers={"quality": "left" if n < failed else "tie"}, shown=0.0, voted=1.0)
        for n in range(4)
    ]
    book = SimpleNamespace(progress=lambda: {1: (4, 4), 2: (0, 4)}, study=study(max_failed=limit))
    first, second = raters(cast(Store, book), votes)
    assert (first["checks"], first["failed"], first["flagged"]) == (4, failed, flagged)
    assert not second["flagged"]
