"""Folders of checkpoints in one process: what counts, what is put right after a kill, and what does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.checkpoint import (
    CheckpointError,
    SaveFailed,
    continuing,
    find_fault,
    folders,
    load,
    load_some,
    newest_good,
    prune,
    read_meta,
    recover,
    save,
)
from sage_grpo.distributed.world import World


def saved(root: Path, number: int = 1, **files: bytes) -> Path:
    return save(root, number, {"b": torch.ones(2), "a": torch.zeros(3)}, {"value": number}, files)


def test_what_was_saved_is_read_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert (folder, read_meta(folder)) == (tmp_path / "000001", {"format": 1, "tensors": ["a", "b"], "value": 1})
    found = {"a": torch.ones(3), "b": torch.zeros(2)}
    load(folder, found, World())
    assert (found["a"].tolist(), found["b"].tolist()) == ([0.0] * 3, [1.0] * 2)
    load_some(folder, {"a": found["b"].new_ones(3)})
    lacks = {name: torch.zeros(1) for name in ("b", "z4", "z3", "z2", "z1")}
    for wanted, said in (
        (lacks, r"it lacks \['z1', 'z2', 'z3'\] and has \['a'\] besides"),
        ({**found, "c": torch.zeros(1)}, r"it lacks \['c'\] and has nothing besides"),
        ({"b": torch.zeros(2)}, r"it lacks nothing and has \['a'\] besides"),
        ({"a": torch.ones(4), "b": torch.zeros(2)}, r"does not fit this configuration: .*[Ss]ize.*\. Use the model"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load(folder, wanted, World())
    many = save(tmp_path, 2, {name: torch.zeros(1) for name in "fedcba"}, {})
    with pytest.raises(CheckpointError, match=r"it lacks nothing and has \['a', 'b', 'c'\] besides"):
        load(many, {"d": torch.zeros(1), "e": torch.zeros(1)}, World())
    (folder / "state.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="has checkpoint format 2; this version reads 1"):
        read_meta(folder)
    for error, words in ((KeyError("x"), "holds what no run writes"), (CheckpointError("own"), "^own$")):
        with pytest.raises(CheckpointError, match=words), continuing(folder):
            raise error
    with pytest.raises(ZeroDivisionError), continuing(folder):
        raise ZeroDivisionError


def test_a_folder_counts_only_with_all_of_its_files_as_they_were(tmp_path: Path) -> None:
    first, second = saved(tmp_path, **{"a.txt": b"abc"}), saved(tmp_path, 12)
    known = {"bytes": 3, "blake2b": "cf4ab791c62b8d2b2109c90275287816"}
    assert checkpoint._fingerprint(first / "a.txt") == known, "checkpoints of earlier versions stay whole"
    (tmp_path / "000013").symlink_to(first)
    for name in ("notes", ".000099.partial", "00014"):
        (tmp_path / name).mkdir()
    assert folders(tmp_path) == [first, second]
    assert folders(tmp_path / "gone") == []
    assert newest_good(tmp_path) == second
    manifest = json.loads((second / "manifest.json").read_text())
    assert find_fault(second) is None
    broken = [
        ([], "does not list the files"),
        ({**manifest, "../state.json": {}}, "names '../state.json', which is not a file of its own"),
        ({name: one for name, one in manifest.items() if name != "state.json"}, "does not list the files"),
        ({"state.json": manifest["state.json"]}, "lists no tensors"),
        ({**manifest, "state.json": {**manifest["state.json"], "bytes": 1}}, "state.json was changed or cut short"),
        ({**manifest, "gone.safetensors": {}}, "FileNotFoundError"),
    ]
    (weights,) = second.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"!")
    assert find_fault(second) == f"{weights.name} was changed or cut short"
    weights.write_bytes(whole)
    for content, said in broken:
        (second / "manifest.json").write_text(json.dumps(content))
        assert said in str(find_fault(second))
    with pytest.warns(UserWarning, match="000012 is damaged .*: using the one before it"):
        assert newest_good(tmp_path) == first


def test_what_a_kill_interrupted_is_finished_or_removed(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        saved(tmp_path, number)
    (tmp_path / "000002").rename(tmp_path / ".000001.partial")  # a newer one of the same number
    (half := tmp_path / ".000003.partial").mkdir()
    for folder in ("000001", "000005"):
        (tmp_path / folder / "mine.txt").write_text("kept")
    (notice,) = recover(tmp_path)
    assert notice.startswith(f"{tmp_path / '000001'} was complete but not yet in its place")
    assert read_meta(tmp_path / "000001")["value"] == 2
    assert (tmp_path / "000001" / "mine.txt").read_text() == "kept"
    assert half.exists()
    saved(tmp_path, 7)
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]
    assert saved(tmp_path, 5) == tmp_path / "000005"
    assert (tmp_path / "000005" / "mine.txt").read_text() == "kept"
    assert read_meta(tmp_path / "000005")["value"] == 5


def test_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch) -> None:
    synced: dict[int, int] = {}
    monkeypatch.setattr(
        checkpoint.os, "fsync", lambda number: synced.update({os.fstat(number).st_ino: os.fstat(number).st_size})
    )
    folder = saved(tmp_path, note=b"1")
    assert synced.keys() == {one.stat().st_ino for one in (*folder.iterdir(), tmp_path)}
    assert all(synced[one.stat().st_ino] == one.stat().st_size for one in folder.iterdir()), "with all that is in them"


def test_the_last_saved_and_the_spared_are_kept(tmp_path: Path) -> None:
    for number in range(1, 7):
        saved(tmp_path, number)
    (tmp_path / "000002" / "mine.txt").write_text("kept")
    (tmp_path / "000002" / "shard-x.safetensors").mkdir()
    prune(tmp_path, keep=2, newest=5, spare=1)
    assert [folder.name for folder in folders(tmp_path)] == ["000001", "000002", "000004", "000005", "000006"]
    assert sorted(one.name for one in (tmp_path / "000002").iterdir()) == ["mine.txt", "shard-x.safetensors"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    error: BaseException = OSError(28, "No space left on device")

    def full(file: Path, content: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "_write", full)
    said = r"Checkpoint 3 could not be written to [^:]*: OSError: .*No space left"
    with pytest.raises(SaveFailed, match=said):
        saved(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match="Interrupted while a checkpoint was saved"):
        saved(tmp_path)
