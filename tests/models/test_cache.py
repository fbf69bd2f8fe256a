"""The cache of encoded prompts: damage is noticed, writers do not disturb one another, a bad disk is a warning."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

import pytest
import torch

from sage_grpo.models.checkpoints import cache
from sage_grpo.models.checkpoints.cache import EncodingCache

TRUTH = {"text": torch.tensor([[0.5, -1.0], [2.0, 3.5]]), "mask": torch.tensor([True, False])}


class Encoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        return dict(TRUTH)


def same(tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == TRUTH.keys() and all(
        tensors[name].dtype == TRUTH[name].dtype and torch.equal(tensors[name], TRUTH[name]) for name in TRUTH
    )


def test_a_file_cut_short_is_encoded_again(tmp_path: Path) -> None:
    EncodingCache(tmp_path, "model").get(("a cat",), Encoder())
    (file,) = tmp_path.rglob("*.safetensors")
    for content in (b"", file.read_bytes()[:100]):
        file.write_bytes(content)
        again = Encoder()
        with pytest.warns(UserWarning, match="damaged"):
            assert same(EncodingCache(tmp_path, "model").get(("a cat",), again))
        assert again.calls == 1


def test_a_disk_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EncodingCache(tmp_path, "model").get(("kept",), Encoder())

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    ours = EncodingCache(tmp_path, "model")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        for prompt in ("a cat", "a dog", "a cat"):
            assert same(ours.get((prompt,), Encoder()))
    assert len(notes) == 1
    assert "model.cache" in str(notes[0].message)
    assert "No space left" in str(notes[0].message)
    assert not list(tmp_path.rglob("*.tmp"))
    never = Encoder()
    assert same(ours.get(("kept",), never))  # what is there is still read
    assert never.calls == 0


def test_another_cleaner_is_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cleaned by ftfy: its version is a part of the key."""
    encode, versions = Encoder(), ["6.3.1", "6.3.1", "7.0"]
    monkeypatch.setattr(cache, "version", lambda name: versions.pop(0))
    for calls in (1, 1, 2):
        EncodingCache(tmp_path, "model").get(("a cat",), encode)
        assert encode.calls == calls
