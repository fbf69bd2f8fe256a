"""Tests of research find the repository, the package and the helpers of its tests, and have a cache folder of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(folder)
    for name in (".", "src", "tests", "research/benchmarks")
    if str(folder := (ROOT / name).resolve()) not in sys.path
]


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as slow, except those that are marked as quick."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
