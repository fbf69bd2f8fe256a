"""Tests of the research code. All of them are slow, and none of them is needed to train a model: `python -m pytest research/tests`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
for folder in ("research/benchmarks", "tests", "src", "."):
    path = str((ROOT / folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is slow, except those that are marked as quick."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
