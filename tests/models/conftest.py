"""Tiny checkpoints, built once a session, and a cache folder that is not the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import double
from sage_grpo.models.spec import ModelSpec


@pytest.fixture(scope="session")
def fresh_model(checkpoint: Callable[[str], Path]) -> Callable:
    """(kind, **spec fields) -> a newly loaded model, without a disk cache unless asked for one."""

    def get(kind: str, **fields: object):
        return ModelSpec(path=str(checkpoint(kind)), **{"cache": None, **fields}).load("cpu")

    return get


@pytest.fixture(scope="session")
def model(fresh_model: Callable) -> Callable:
    """The same, loaded once a session for each choice of fields: for tests that leave the model as it is."""
    loaded = {}

    def get(kind: str, **fields: object):
        key = (kind, repr(sorted(fields.items())), torch.get_default_dtype())
        if key not in loaded:
            loaded[key] = fresh_model(kind, **fields)
        return loaded[key]

    return get


@pytest.fixture
def in_double(_isolated: None) -> Iterator[None]:
    """The whole test in float64, ours and the stock pipeline: see double.py. What it compares agrees to `double.CLOSE`."""
    with double.whole():
        yield


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
