"""Settings of a whole test run that no library reads from its environment (scripts/test_matrix.py, `pytest -p matrix_plugin`).

SAGE_GRPO_MKLDNN=off computes without oneDNN. SAGE_GRPO_SHUFFLE=7 shuffles the files and the tests in each by that seed; a file's tests
stay together, because they share what is expensive to make.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def apply() -> None:
    """In this process; a rank that a test starts calls it too."""
    if os.environ.get("SAGE_GRPO_MKLDNN") == "off":
        torch.backends.mkldnn.set_flags(False)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in another order, and the tests of each; the same for every worker."""
    draw = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = sorted(files)
    draw.shuffle(order)
    for path in order:
        draw.shuffle(files[path])
    return [item for path in order for item in files[path]]


def pytest_configure() -> None:
    apply()


def pytest_report_header() -> list[str]:
    given = {name: os.environ.get(name) for name in ("SAGE_GRPO_MKLDNN", "SAGE_GRPO_SHUFFLE")}
    return [f"matrix: {name}={value}" for name, value in given.items() if value]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """After conftest.py, which puts them in an order of its own."""
    yield
    seed = os.environ.get("SAGE_GRPO_SHUFFLE")
    if seed:
        items[:] = shuffled(items, int(seed))
