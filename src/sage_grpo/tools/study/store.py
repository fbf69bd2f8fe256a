"""The study's one file, an SQLite database: questions, raters, and every vote.

A vote that was answered with success is on the disk (write-ahead log, synchronous=FULL), whatever happens to the process
or the machine afterwards. It counts once: there is one row per task, and a task is one rater and one comparison. Tokens are
kept as hashes only.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sage_grpo.tools.study.pairs import Shown, Task
from sage_grpo.utils.json_schema import DocumentError, demand, misfit, parse_json, shown

VERSION = 1
ANSWERS = ("left", "tie", "right")
SCHEMA = """
CREATE TABLE study (version INTEGER NOT NULL, settings TEXT NOT NULL, admin TEXT NOT NULL);
CREATE TABLE clips (
  prompt INTEGER NOT NULL, method INTEGER NOT NULL, degraded INTEGER NOT NULL, file TEXT NOT NULL UNIQUE,
  PRIMARY KEY (prompt, method, degraded)
) WITHOUT ROWID;
CREATE TABLE raters (id INTEGER PRIMARY KEY, token TEXT NOT NULL UNIQUE);
CREATE TABLE tasks (
  id INTEGER PRIMARY KEY, rater INTEGER NOT NULL REFERENCES raters, place INTEGER NOT NULL, identity TEXT NOT NULL,
  prompt INTEGER NOT NULL, left_method INTEGER NOT NULL, left_degraded INTEGER NOT NULL,
  right_method INTEGER NOT NULL, right_degraded INTEGER NOT NULL,
  name TEXT NOT NULL UNIQUE, left_name TEXT NOT NULL UNIQUE, right_name TEXT NOT NULL UNIQUE, shown REAL,
  UNIQUE (rater, place), UNIQUE (rater, identity)
);
CREATE TABLE votes (
  task INTEGER PRIMARY KEY REFERENCES tasks, nonce TEXT NOT NULL UNIQUE, answers TEXT NOT NULL, voted REAL NOT NULL
);
"""
SIDES = "{0}method NOT BETWEEN 0 AND :methods - 1 OR {0}degraded NOT IN (0, 1)"
FAULTS = {
    "PRAGMA integrity_check(1)": "it is damaged",
    "PRAGMA foreign_key_check": "a row belongs to none",
    f"SELECT file FROM clips WHERE prompt NOT BETWEEN 0 AND :prompts - 1 OR {SIDES.format('')}": "it has a clip of nothing",
    "SELECT :prompts WHERE (SELECT COUNT(*) FROM clips WHERE NOT degraded) != :prompts * :methods": "it lacks clips of its prompts",
    f"SELECT id FROM tasks WHERE prompt NOT BETWEEN 0 AND :prompts - 1 OR {SIDES.format('left_')} OR {SIDES.format('right_')}": "it asks for nothing",
    "SELECT task FROM votes JOIN tasks ON tasks.id = task WHERE NOT (shown BETWEEN 0 AND 2e11 AND voted BETWEEN 0 AND 2e11) OR shown IS NULL": "a vote has no time",
}
"""Queries that find nothing (or "ok") in a valid database, and the fault that they find."""
LARGEST = 1 << 26
"""Bytes of a value; a study's values are far smaller."""
TASK = "prompt, left_method, left_degraded, right_method, right_degraded"


class StudyError(ValueError):
    """A study that cannot be made, opened or used; the message says why."""


class NoSuchTask(StudyError):
    """The rater has no such task, or has not seen it yet."""


class OtherVote(StudyError):
    """The task has another vote already."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings of a study; fixed when it is made."""

    title: str
    methods: Sequence[str]
    prompts: Sequence[str]
    dimensions: Mapping[str, str]
    against: int | None
    """The one method that is compared with each of the others; None compares all."""
    checks: int
    max_failed: float
    """A rater who fails a larger share of the attention checks is flagged."""
    pool: Sequence[tuple[int, int]]
    """Clips (prompt, method) that have a spoilt copy."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class RaterTask:
    """A task as the rater may know it: opaque names, and no methods."""

    name: str
    prompt: str
    left: str
    right: str


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A vote, and the task that it answers."""

    rater: int
    place: int
    task: Task
    answers: Mapping[str, str]
    shown: float
    voted: float


def hashed(token: str) -> str:
    """The stored hash of a token. A token is 32 random bytes, so that a plain hash cannot be searched."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    return secrets.token_urlsafe(32)


class Store:
    """The database of a study; may be used by several threads, and by several processes at a time."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise StudyError(
                f"There is no study in {file.parent} ({file.name} is missing): make one with `sage-grpo study create`."
            )
        self._lock = threading.RLock()
        self._db = _connect(file)
        try:
            self.study = _study(self._db, file)
            self.votes()  # this reads every answer
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            raise error if isinstance(error, StudyError) else _strange(file, error) from error

    @classmethod
    def create(cls, file: Path, study: Study, clips: Mapping[tuple[int, Shown], str]) -> tuple[Store, str]:
        token = new_token()
        rows = [(prompt, shown.method, shown.degraded, name) for (prompt, shown), name in clips.items()]
        db = _connect(file, new=True)
        try:
            db.executescript(f"BEGIN IMMEDIATE;{SCHEMA}")
            db.execute("INSERT INTO study VALUES (?, ?, ?)", (VERSION, json.dumps(asdict(study)), hashed(token)))
            db.executemany("INSERT INTO clips VALUES (?, ?, ?, ?)", rows)
            db.execute("COMMIT")
        finally:
            db.close()
        return cls(file), token

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _read(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def is_admin(self, token: str) -> bool:
        ((stored,),) = self._read("SELECT admin FROM study")
        return secrets.compare_digest(stored.encode(), hashed(token).encode())

    def rater_of(self, token: str) -> int | None:
        found = self._read("SELECT id FROM raters WHERE token = ?", (hashed(token),))
        return found[0][0] if found else None

    def add_rater(self, tasks: Sequence[Task]) -> tuple[int, str]:
        """A new rater with these tasks: number and token. Only the hash of the token is kept."""
        token = new_token()
        with self._writing() as db:
            rater = db.execute("INSERT INTO raters (token) VALUES (?)", (hashed(token),)).lastrowid
            assert rater is not None
            names = [[secrets.token_urlsafe(16) for _ in range(3)] for _ in tasks]
            db.executemany(
                f"INSERT INTO tasks (rater, place, identity, {TASK}, name, left_name, right_name) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (rater, place, task.identity, task.prompt, *task.left, *task.right, *name)
                    for place, (task, name) in enumerate(zip(tasks, names))
                ],
            )
        return rater, token

    def renew(self, rater: int | None) -> str:
        """A new token in place of the old one; None is the token of the results."""
        token = new_token()
        with self._writing() as db:
            if rater is None:
                db.execute("UPDATE study SET admin = ?", (hashed(token),))
            elif not db.execute("UPDATE raters SET token = ? WHERE id = ?", (hashed(token), rater)).rowcount:
                raise StudyError(f"There is no rater {rater}: this study has {len(self.progress())}.")
        return token

    def progress(self) -> dict[int, tuple[int, int]]:
        rows = self._read(
            "SELECT raters.id, COUNT(votes.task), COUNT(tasks.id) FROM raters "
            "LEFT JOIN tasks ON tasks.rater = raters.id LEFT JOIN votes ON votes.task = tasks.id GROUP BY raters.id"
        )
        return {rater: (done, total) for rater, done, total in rows}

    def ask(self, rater: int, count: int = 2) -> list[RaterTask]:
        """The rater's next tasks without a vote, at most `count`; the first one counts as shown from now on."""
        with self._writing() as db:
            rows = db.execute(
                "SELECT id, shown, prompt, name, left_name, right_name FROM tasks WHERE rater = ? AND NOT EXISTS "
                "(SELECT 1 FROM votes WHERE votes.task = tasks.id) ORDER BY place LIMIT ?",
                (rater, count),
            ).fetchall()
            if rows and rows[0][1] is None:
                db.execute("UPDATE tasks SET shown = ? WHERE id = ?", (time.time(), rows[0][0]))
        return [
            RaterTask(prompt=self.study.prompts[prompt], name=name, left=left, right=right)
            for _, _, prompt, name, left, right in rows
        ]

    def vote(self, rater: int, name: str, nonce: str, answers: Mapping[str, str]) -> bool:
        """Store a vote; True if it is new, False if this very vote was stored before.

        NoSuchTask and OtherVote refuse invalid votes; nothing is changed then.
        """
        text = json.dumps(answers, sort_keys=True)
        with self._writing() as db:
            task = db.execute(
                "SELECT id FROM tasks WHERE name = ? AND rater = ? AND shown IS NOT NULL", (name, rater)
            ).fetchone()
            if task is None:
                raise NoSuchTask("You have no such task.")
            stored = db.execute("SELECT nonce, answers FROM votes WHERE task = ?", task).fetchone()
            if stored == (nonce, text):
                return False
            if stored is not None:
                raise OtherVote("This comparison has a vote already.")
            if db.execute("SELECT 1 FROM votes WHERE nonce = ?", (nonce,)).fetchone():
                raise OtherVote("This nonce belongs to another vote.")
            db.execute("INSERT INTO votes VALUES (?, ?, ?, ?)", (*task, nonce, text, time.time()))
        return True

    def clip(self, name: str) -> str | None:
        """The file behind the opaque name of a task's left or right clip."""
        found = self._read(
            "SELECT file FROM tasks JOIN clips ON clips.prompt = tasks.prompt AND "
            "clips.method = CASE ?1 WHEN left_name THEN left_method ELSE right_method END AND "
            "clips.degraded = CASE ?1 WHEN left_name THEN left_degraded ELSE right_degraded END "
            "WHERE left_name = ?1 OR right_name = ?1",
            (name,),
        )
        return found[0][0] if found else None

    def clip_of(self, prompt: int, method: int) -> str:
        ((file,),) = self._read(
            "SELECT file FROM clips WHERE prompt = ? AND method = ? AND degraded = 0", (prompt, method)
        )
        return str(file)

    def files(self) -> list[str]:
        return [file for (file,) in self._read("SELECT file FROM clips ORDER BY file")]

    def votes(self) -> list[Vote]:
        rows = self._read(
            f"SELECT rater, place, answers, shown, voted, {TASK} FROM votes JOIN tasks ON tasks.id = votes.task "
            "ORDER BY rater, place"
        )
        return [
            Vote(
                rater=rater,
                place=place,
                answers=self._answers(answers),
                shown=shown,
                voted=voted,
                task=Task(prompt, Shown(left, bool(left_spoilt)), Shown(right, bool(right_spoilt))),
            )
            for rater, place, answers, shown, voted, prompt, left, left_spoilt, right, right_spoilt in rows
        ]

    def _answers(self, text: str) -> dict[str, str]:
        """A vote's answers: one to every question, and no other."""
        answers = parse_json(text, "a vote")
        if not isinstance(answers, dict) or answers.keys() != self.study.dimensions.keys():
            raise DocumentError(f"a vote must answer {', '.join(self.study.dimensions)}, got {shown(answers)}.")
        demand(answers, dict.fromkeys(answers, str), "a vote")
        if not set(answers.values()) <= set(ANSWERS):
            raise DocumentError(f"an answer must be one of {', '.join(ANSWERS)}, got {shown(answers)}.")
        return answers


def _strange(file: Path, why: object) -> StudyError:
    return StudyError(f"{file} is not the database of a study: {str(why).rstrip('.')}.")


def _connect(file: Path, *, new: bool = False) -> sqlite3.Connection:
    """A connection that waits for other writers, and whose commits are on the disk. An existing file is untrusted until its tables match:
    a view or a trigger in it could run for any length of time."""
    db = sqlite3.connect(file, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        if not new and _tables(db) != _expected():
            raise _strange(file, "its tables are not those that `sage-grpo study create` makes")
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            db.execute(f"PRAGMA {pragma}")
    except (sqlite3.Error, StudyError) as error:
        db.close()
        raise error if isinstance(error, StudyError) else _strange(file, error) from error
    return db


def _tables(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()


@cache
def _expected() -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return _tables(db)


def _study(db: sqlite3.Connection, file: Path) -> Study:
    ((version, settings), *more) = db.execute("SELECT version, settings FROM study").fetchall() or [(None, None)]
    if version != VERSION or more:
        raise StudyError(f"{file} is of version {shown(version)}; this program reads version {VERSION}.")
    content = parse_json(settings, "its settings")
    if isinstance(content, dict):
        content.pop("per_rater", None)  # studies of earlier versions had a number of comparisons for each rater
    fault = misfit(content, Study, "settings")
    if fault:
        raise _strange(file, fault)
    study = Study(**content)
    prompts, methods = len(study.prompts), len(study.methods)
    if not (prompts and methods > 1 and study.dimensions and (study.against is None or 0 <= study.against < methods)):
        raise _strange(file, f"its settings hold {shown(content)}")
    if not all(len(one) == 2 and 0 <= one[0] < prompts and 0 <= one[1] < methods for one in study.pool):
        raise _strange(file, f"it has clips {shown(study.pool)} of {prompts} prompts and {methods} methods")
    for query, fault in FAULTS.items():
        found = db.execute(query, {"prompts": prompts, "methods": methods}).fetchone()
        if found not in (None, ("ok",)):
            raise _strange(file, f"{fault} ({shown(found[0])})")
    for table in ("study", "clips", "raters", "tasks", "votes"):
        for _, column, kind, needed, _, key in db.execute(f"PRAGMA table_info({table})").fetchall():
            kinds = (kind.lower(), *(() if needed or key else ("null",)))
            for value, stored in db.execute(f"SELECT {column}, typeof({column}) FROM {table}"):
                if stored not in kinds:
                    raise _strange(file, f"{column} of {table} holds {shown(value)}")
    return study
