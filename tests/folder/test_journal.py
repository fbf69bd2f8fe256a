"""metrics.jsonl against what happens to files: kills, full disks, editors, bits. A checkpoint's copy of the rows decides."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sage_grpo.folder import journal
from sage_grpo.folder.journal import Journal, read_rows, reopen
from sage_grpo.session import run as train


def lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "cut in the first row": lambda data: data[:20],
    "last row lost": lambda data: b"".join(lines(data)[:-1]),
    "row in the middle lost": lambda data: b"".join([*lines(data)[:1], *lines(data)[2:]]),
    "row twice": lambda data: b"".join([*lines(data)[:2], *lines(data)[1:]]),
    "rows swapped": lambda data: b"".join([*lines(data)[1::-1], *lines(data)[2:]]),
    "a digit changed": lambda data: flipped(data, data.index(b"0.") + 3, 0),
    "no UTF-8": lambda data: flipped(data, 5, 7),
    "zeros in the middle": lambda data: data[:50] + bytes(100) + data[150:],
    "newline lost": lambda data: data.replace(b"\n", b"", 1),
    "Windows line ends": lambda data: data.replace(b"\n", b"\r\n"),
    "NaN": lambda data: data.replace(b'"iteration": 1,', b'"iteration": 1, "x": NaN,', 1),
    "pretty-printed": lambda data: b"".join(json.dumps(json.loads(line), indent=1).encode() for line in lines(data)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_repaired_named_and_kept(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    book = Journal(file)
    for iteration in range(4):
        book.write(iteration, {"reward/total": 0.25 + iteration / 16, "reward/std": 0.5, "kl/total": 1e-7})
    good = bytes(book.rows)
    bad = DAMAGE[kind](good)
    assert bad != good
    file.unlink() if bad is None else file.write_bytes(bad)
    _, notice = reopen(file, good)
    assert file.read_bytes() == good
    assert "metrics.jsonl was damaged" in notice
    assert [file.read_bytes() for file in tmp_path.glob("metrics.damaged-*.jsonl")] == [bad] * bool(bad)


def test_rows_after_the_checkpoint_are_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    book = Journal(file)
    for iteration in range(3):
        book.write(iteration, {"a": 1.0})
    recorded = bytes(book.rows)
    book.write(3, {"a": 2.0})
    file.write_bytes(file.read_bytes()[:-5])  # and a kill cut the last one short
    again, notice = reopen(file, recorded)
    assert notice == ""
    again.write(3, {"a": 3.0})
    assert [row["a"] for row in read_rows(file)] == [1.0, 1.0, 1.0, 3.0]


def test_damage_is_described() -> None:
    good = b"".join(json.dumps({"iteration": n, "a": 0.25 * n + 0.125}).encode() + b"\n" for n in range(4))
    for kind, told in (
        ("row in the middle lost", "1 of 4 rows missing or changed; from line 2 on"),
        ("row twice", "1 rows more than once; from line 3 on"),
        ("rows swapped", "rows out of order; from line 1 on"),
    ):
        assert told in journal.describe_damage(DAMAGE[kind](good) or b"", good)


def test_a_journal_with_rows_is_never_emptied(make_config, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(iterations=1)
    train(config)
    out = Path(config.out)
    shutil.rmtree(out / "checkpoints")
    before, kept = (out / "metrics.jsonl").read_bytes(), out / "metrics.old-2.jsonl"
    (out / "metrics.old-1.jsonl").write_text("")
    train(config)
    assert kept.read_bytes() == before
    said = " ".join(capsys.readouterr().out.split())
    assert "has 3 rows, but there is no checkpoint to continue from: the run starts anew" in said
    assert f"They are kept in {kept}" in said


def test_a_full_disk_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Journal(tmp_path / "m.jsonl")
    book.write(1, {"a": 1.0})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        (tmp_path / "m.jsonl").write_bytes(book.rows[:10])  # what a full disk leaves of it
        with pytest.warns(UserWarning, match=r"No space left.*row 2 is kept"):
            book.write(2, {"a": 2.0})
    book.write(3, {"a": 3.0})
    assert [row["a"] for row in read_rows(tmp_path / "m.jsonl")] == [1.0, 2.0, 3.0]


def test_readers_pass_over_what_is_no_row(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"iteration": 1}\n\xff\xfe\n[1]\n{"iteration": "2"}\n{"a": 1}\n\n{"iteration": 2}')
    assert [row["iteration"] for row in read_rows(file)] == [1, 2]
    assert read_rows(tmp_path / "none.jsonl") == []
