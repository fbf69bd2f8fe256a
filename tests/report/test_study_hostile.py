"""Databases that no study made: each is refused in one sentence, and none keeps its reader busy."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_grpo.study.making import invite
from sage_grpo.study.store import Store, StudyError
from studies import created, study

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)"
"""Without its end it would be read for ever."""
SETTING = "UPDATE study SET settings = json_set(settings, '$.{}', json('{}'))"
UNCHECKED = "PRAGMA foreign_keys=OFF; PRAGMA ignore_check_constraints=ON;"
CHANGES = {
    "votes from a view": f"DROP TABLE votes; CREATE VIEW votes AS {ENDLESS} SELECT i AS task, 'x' AS nonce, '{{}}' AS answers, 1.0 AS voted FROM n",
    "settings from a view": f"ALTER TABLE study RENAME TO s; CREATE VIEW study AS {ENDLESS} SELECT version, settings, admin FROM s, n",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON votes BEGIN DELETE FROM votes; END",
    "a generated column": "ALTER TABLE votes ADD COLUMN x TEXT AS (hex(zeroblob(1000000)))",
    "another table": "CREATE TABLE more (x)",
    "no table": "DROP TABLE votes",
    "other columns": "ALTER TABLE votes RENAME COLUMN voted TO cast",
    "no settings": "DELETE FROM study",
    "settings twice": "INSERT INTO study SELECT * FROM study",
    "another version": "UPDATE study SET version = 99",
    "no version": "UPDATE study SET version = 'x'",
    "settings of bytes": "UPDATE study SET settings = zeroblob(100)",
    "large settings": "UPDATE study SET settings = zeroblob(100000000)",
    "settings that are no JSON": "UPDATE study SET settings = 'x'",
    "settings with more": SETTING.format("more", "1"),
    "methods of a number": SETTING.format("methods", "3"),
    "methods of numbers": SETTING.format("methods", "[1, 2, 3]"),
    "one method": SETTING.format("methods", '["m0"]'),
    "more methods": SETTING.format("methods", '["a", "b", "c", "d"]'),
    "fewer prompts": SETTING.format("prompts", '["p0"]'),
    "other dimensions": SETTING.format("dimensions", '{"other": "Which?"}'),
    "dimensions of a list": SETTING.format("dimensions", '["quality"]'),
    "against nothing": SETTING.format("against", "7"),
    "a pool of nothing": SETTING.format("pool", "[[9, 9]]"),
    "a pool beyond the prompts": SETTING.format("pool", "[[3, 0]]"),
    "a pool beyond the methods": SETTING.format("pool", "[[0, 3]]"),
    "a pool of one": SETTING.format("pool", "[[0]]"),
    "a share in words": SETTING.format("max_failed", '"x"'),
    "an answer that is no JSON": "UPDATE votes SET answers = 'x'",
    "an answer in a list": "UPDATE votes SET answers = '[]'",
    "an odd answer": """UPDATE votes SET answers = '{"quality": "both"}'""",
    "an answer of a list": """UPDATE votes SET answers = '{"quality": ["left"]}'""",
    "no letters": "UPDATE tasks SET name = CAST(x'ff00' AS TEXT) WHERE id = 1",
    "an admin of bytes": "UPDATE study SET admin = x'00'",
    "a prompt that is not there": "UPDATE tasks SET prompt = 99 WHERE id = 1",
    "a prompt in words": "UPDATE tasks SET prompt = 'x' WHERE id = 1",
    "a method that is not there": "UPDATE tasks SET left_method = -1 WHERE id = 1",
    "a clip that is half spoilt": "UPDATE clips SET degraded = 7 WHERE prompt = 0 AND method = 0 AND degraded = 1",
    "a clip less": "DELETE FROM clips WHERE degraded = 0 AND prompt = 0 AND method = 0",
    "a vote before it was shown": "UPDATE tasks SET shown = NULL",
    "a vote at no time": "UPDATE votes SET voted = 9e999",
    "a vote in words": "UPDATE votes SET voted = 'soon'",
    "a vote on nothing": "UPDATE votes SET task = 99",
}


def changed(sql: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.executescript(f"{UNCHECKED}{sql}")

    return change


@pytest.mark.parametrize("kind", [*CHANGES, "cut short", "overwritten", "no database"])
def test_what_no_study_writes_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "study.sqlite"
    with contextlib.closing(created(file, study())) as store:
        rater, _ = invite(store)
        asked = store.ask(rater)[0]
        store.vote(rater, asked.name, "n", {"quality": "left"})
    Store(file).close()  # as it was made it is one
    content = file.read_bytes()
    others = {
        "cut short": content[: len(content) // 2],
        "overwritten": content[:4096] + b"\xff" * (len(content) - 4096),
    }
    if kind in CHANGES:
        changed(CHANGES[kind])(file)
    else:
        file.write_bytes(others.get(kind, b"no database " * 1000))
    with pytest.raises(StudyError, match=r"study\.sqlite is (not the database of a study|of version)") as refused:
        Store(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
