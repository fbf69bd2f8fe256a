"""State and rows of a run that somebody else made, or that a disk has damaged: read, left out with a word, or refused in one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.folder.identity import differences
from sage_grpo.folder.journal import read_events, read_rows
from sage_grpo.folder.saved import Choice
from sage_grpo.models.spec import ModelSpec
from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.checkpoint import CheckpointError, continuing, read_meta

META = {"format": 1, "tensors": ["weights/a"], "iteration": 1, "config": {"iterations": 3}, "best": {"iteration": 1}}
KINDS = {"config": dict, "iteration": int, "best": dict}


def saved(tmp_path: Path, text: str) -> Path:
    """A checkpoint whose state says this."""
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
    """They are sorted by both."""
    good = {"time": 1.5, "kind": "start", "iteration": 0, "text": "x"}
    for odd in ("x", [], {}, True, 10**400, None):
        rows = [good, {**good, "time": odd}, {**good, "iteration": odd}, {**good, "kind": odd if odd != "x" else None}]
        (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + "[" * 5000)
        assert read_events(tmp_path) == [good, {**good, "time": None}]
