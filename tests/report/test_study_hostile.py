"""Databases that no study made: each is refused in one sentence, and none keeps its reader busy."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from sage_grpo.tools.study import store
from sage_grpo.tools.study.making import invite
from sage_grpo.tools.study.store import Store, StudyError
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
    "no table": "DROP TABLE votes",
    "no settings": "DELETE FROM study",
    "another version": "UPDATE study SET version = 99",
    "settings of bytes": "UPDATE study SET settings = zeroblob(100)",
    "large settings": "UPDATE study SET settings = zeroblob(2000000)",
    "settings with more": SETTING.format("more", "1"),
    "methods of a number": SETTING.format("methods", "3"),
    "one method": SETTING.format("methods", '["m0"]'),
    "fewer prompts": SETTING.format("prompts", '["p0"]'),
    "other dimensions": SETTING.format("dimensions", '{"other": "Which?"}'),
    "against nothing": SETTING.format("against", "7"),
    "a pool of nothing": SETTING.format("pool", "[[9, 9]]"),
    "a pool beyond the prompts": SETTING.format("pool", "[[3, 0]]"),
    "a pool of one": SETTING.format("pool", "[[0]]"),
    "a share in words": SETTING.format("max_failed", '"x"'),
    "an answer that is no JSON": "UPDATE votes SET answers = 'x'",
    "an odd answer": """UPDATE votes SET answers = '{"quality": "both"}'""",
    "an answer of a list": """UPDATE votes SET answers = '{"quality": ["left"]}'""",
    "no letters": "UPDATE tasks SET name = CAST(x'ff00' AS TEXT) WHERE id = 1",
    "an admin of bytes": "UPDATE study SET admin = x'00'",
    "a prompt that is not there": "UPDATE tasks SET prompt = 99 WHERE id = 1",
    "a method that is not there": "UPDATE tasks SET left_method = -1 WHERE id = 1",
    "a clip that is half spoilt": "UPDATE clips SET degraded = 7 WHERE prompt = 0 AND method = 0 AND degraded = 1",
    "a clip less": "DELETE FROM clips WHERE degraded = 0 AND prompt = 0 AND method = 0",
    "a vote before it was shown": "UPDATE tasks SET shown = NULL",
    "a vote at no time": "UPDATE votes SET voted = 9e999",
    "a vote in words": "UPDATE votes SET voted = 'soon'",
    "a vote on nothing": "UPDATE votes SET task = 99",
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("study") / "study.sqlite"
    with contextlib.closing(created(file, study())) as made:
        rater, _ = invite(made)
        asked = made.ask(rater)[0]
        made.vote(rater, asked.name, "n", {"quality": "left"})
    Store(file).close()  # as it was made it is one
    return file.read_bytes()


@pytest.mark.parametrize("kind", [*CHANGES, "cut short", "overwritten", "no database"])
def test_what_no_study_writes_is_refused_in_one_sentence(kind, content: bytes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "LARGEST", 1 << 20)
    file = tmp_path / "study.sqlite"
    others = {
        "cut short": content[: len(content) // 2],
        "overwritten": content[:4096] + b"\xff" * (len(content) - 4096),
    }
    file.write_bytes(content if kind in CHANGES else others.get(kind, b"no database " * 1000))
    if kind in CHANGES:
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.executescript(f"{UNCHECKED}{CHANGES[kind]}")
    with pytest.raises(StudyError, match=r"study\.sqlite is (not the database of a study|of version)") as refused:
        Store(file)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
