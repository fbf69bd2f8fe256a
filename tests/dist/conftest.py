"""Tiny checkpoints for tests that start several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> folder of a tiny random checkpoint."""
    root = tmp_path_factory.mktemp("tiny_dist")

    def get(kind: str) -> Path:
        folder = root / kind
        return folder if folder.is_dir() else tiny.build(kind, folder)

    return get


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts several processes."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.dist)
