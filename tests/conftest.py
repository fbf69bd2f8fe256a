"""Fixtures of all tests: tiny checkpoints built once a session, and a cache folder that is not the user's."""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import tiny

# No test waits for a clock: a machine that is half as fast, or shared, draws the same examples.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() != "planted":  # mutants/plant.py has its own
    settings.load_profile("unhurried")

FIRST = ("e2e", "typed", "test_blocks.py", "test_study.py", "test_release.py", "test_pretrain.py")
"""Folders and files with few tests that take long."""
TOGETHER = "distributed"
"""A folder whose tests start several processes each: side by side they take a quarter more of the CPU's time than one after the other."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """The order of tests. Files that take long come first: one that is left for the end keeps the others waiting."""
    yield
    counts = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        folder, file = item.path.parts[-2:]
        return folder != TOGETHER, not {folder, file} & set(FIRST), -counts[item.path], str(item.path)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker has one file at a time, whose fixtures are then made once, or all that go together. pytest-xdist's own groups (loadgroup) do
    nothing under this version of pytest, without a word."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return TOGETHER if Path(file).parts[-2:-1] == (TOGETHER,) else file

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Objects of the libraries stay: without this every collection of garbage looks at all of it again (a quarter of a second)."""
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def get(kind: str) -> Path:
        folder = root / kind
        return folder if folder.is_dir() else tiny.build(kind, folder)

    return get


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    """name -> that file of research/benchmarks/, whose files are scripts beside one another."""

    def load(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(Path(__file__).parents[1] / "research" / "benchmarks")
            return importlib.import_module(name)

    return load


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


OF_THE_PROCESS = {
    "PYTEST_CURRENT_TEST",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that may change: pytest's own, and those that a run sets for the whole process where PyTorch has CUDA."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _surroundings() -> dict[str, Any]:
    """State that tests of one worker share and must leave as it was."""
    return {
        "the working folder": os.getcwd(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch.float32": (torch.float32, np.float32),  # double.py changes what they mean
        "torch's threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "oneDNN": bool(torch.backends.mkldnn.enabled),
        "gradients": torch.is_grad_enabled(),
        "signal handlers": tuple(signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)),
    }


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """A test starts with the same random numbers whatever came before it, and leaves the process as it found it."""
    # Not torch.manual_seed, which also writes down the whole stack, for a GPU that may come.
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries use it
    random.seed(0)
    before, environment, modules, path = _surroundings(), dict(os.environ), dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path  # the program adds the folder that it is called in, for the user's own modules
    # PyTorch's doing, not the test's: a product in bfloat16 on a CPU without it turns oneDNN off, and the neighbours' last digits change.
    torch.backends.mkldnn.enabled = before["oneDNN"]
    after = _surroundings()
    changed = [f"{what}: {before[what]!r} -> {after[what]!r}" for what in before if before[what] != after[what]]
    names = {name for name, _ in environment.items() ^ os.environ.items()} - OF_THE_PROCESS
    changed += [f"{name} in the environment: {environment.get(name)!r} -> {os.environ.get(name)!r}" for name in names]
    changed += [f"sys.modules[{name!r}]" for name, module in modules.items() if sys.modules.get(name) is not module]
    assert not changed, "the test leaves behind: " + "; ".join(text[:300] for text in changed)
