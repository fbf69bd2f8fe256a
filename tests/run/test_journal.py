"""Rows, events and states against what happens to files (kills, full disks, editors, bits) or somebody else made of them."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.callbacks.journal import Journal, read_events, read_rows, reopen
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.checkpoint import CheckpointError, continuing, read_meta
from sage_grpo.models.spec import ModelSpec
from sage_grpo.run.identity import differences
from sage_grpo.run.saved import Choice
from sage_grpo.run.session import run as train


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
    assert re.search(r"metrics.jsonl was damaged \((it is missing|line [1-4] of 4 is not)", notice)
    assert kind != "last row lost" or "line 4 of 4" in notice
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
    assert (notice, file.read_bytes()) == ("", recorded)
    again.write(3, {"a": 3.0})
    assert [row["a"] for row in read_rows(file)] == [1.0, 1.0, 1.0, 3.0]


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


META = {"format": 1, "tensors": ["weights/a"], "iteration": 1, "config": {"iterations": 3}, "best": {"iteration": 1}}
KINDS = {"config": dict, "iteration": int, "best": dict}


def saved(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(text)
    (folder / "shard.safetensors").write_bytes(b"x")
    prints = {name: checkpoint._fingerprint(folder / name) for name in ("state.json", "shard.safetensors")}
    (folder / "manifest.json").write_text(json.dumps(prints))
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '"x"', "[" * 5000, "1" * 5000, '{"format": 2, "tensors": []}',
        json.dumps({**META, "tensors": None}), json.dumps({**META, "tensors": [3]}), json.dumps({**META, "config": []}),
        json.dumps({**META, "iteration": True}), json.dumps({**META, "iteration": 10**400}), json.dumps({**META, "best": None}),
        json.dumps({name: value for name, value in META.items() if name != "config"}),
    ],
)  # fmt: skip
def test_odd_states_are_refused_in_words(text: str, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="000001"):
        read_meta(saved(tmp_path, text), KINDS)
    assert read_meta(saved(tmp_path, json.dumps(META)), KINDS) == META


OUTSIDE = [json.dumps({name: {"bytes": 0, "blake2b": ""}}) for name in ("/dev/zero", "../state.json", "a/b")]


@pytest.mark.parametrize("manifest", ["", "[]", "[" * 5000, '{"state.json": 3}', *OUTSIDE])
def test_odd_manifests_are_faults(manifest: str, tmp_path) -> None:
    folder = saved(tmp_path, json.dumps(META))
    assert checkpoint.find_fault(folder) is None
    (folder / "manifest.json").write_text(manifest)
    assert checkpoint.find_fault(folder)


@pytest.mark.parametrize(
    "change", [{"config": {}}, {"config": {"iterations": "x"}}, {"best": {"iteration": []}}, {"best": 3}]
)
def test_odd_states_are_refused_where_weights_are_chosen(change: dict[str, Any], tmp_path) -> None:
    saved(tmp_path, json.dumps({**META, **change}))
    with pytest.raises(CheckpointError):
        Choice(run=str(tmp_path / "run"), weights="best").find(ModelSpec())


@pytest.mark.parametrize("error", [KeyError("kl"), TypeError(), ValueError(), AttributeError(), OverflowError()])
def test_what_cannot_be_taken_over_is_the_state(error: Exception, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json"), continuing(tmp_path):
        raise error
    with pytest.raises(CheckpointError, match=r"^said$"), continuing(tmp_path):
        raise CheckpointError("said")


def test_rewards_of_any_form_are_compared() -> None:
    for odd in (None, "x", ["x"], [[1]], 3):
        assert differences({"rewards": odd}, {"rewards": [{"name": "a"}]})


def test_rows_that_no_run_writes_are_left_out_with_a_word(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = {"iteration": 1, "reward/total": 1.5, "eval/total": None}
    odd = [
        [1], "x", {"a": 1}, {"iteration": "1"}, {"iteration": True}, {"iteration": -1}, {"iteration": 1.5},
        {**good, "a": "x"}, {**good, "a": {}}, {**good, "a": True}, {**good, "a": 10**400},
    ]  # fmt: skip
    for row in odd:
        file.write_text(json.dumps(row) + "\n" + json.dumps(good) + "\n")
        with pytest.warns(UserWarning, match="line 1 "):
            assert read_rows(file) == [good]


def test_what_a_kill_cut_short_is_left_out_without_a_word_and_no_number_is_none(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1, "a": NaN, "b": -Infinity, "c": 2}\n' + "[" * 5000 + '\n{"iteration": 2, "a"')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_rows(file) == [{"iteration": 1, "a": None, "b": None, "c": 2}]


def test_events_have_numbers_for_times_and_iterations(tmp_path) -> None:
    good = {"time": 1.5, "kind": "start", "iteration": 0, "text": "x"}
    for odd in ("x", [], {}, True, 10**400, None):
        rows = [good, {**good, "time": odd}, {**good, "iteration": odd}, {**good, "kind": odd if odd != "x" else None}]
        (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + "[" * 5000)
        assert read_events(tmp_path) == [good, {**good, "time": None}]
