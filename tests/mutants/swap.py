"""Errors within functions, planted in a process that has the package and the tests already: each is a fork in which one function has other code.

That costs a tenth of a second where a process that imports the package anew takes half a second, and generated errors are many. Code that
runs on import is not tried here (reach.py): what it made would be of the code as it was.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from mutants import pattern
from mutants.error import PACKAGE, PlantedError

BROKEN = 3
"""Exit code of a fork in which the error could not be planted."""
SECONDS, TIMES = 3.0, 5.0
"""A test has this long, and this many times as long as without an error."""


def can_be_swapped(error: PlantedError, root: Path) -> bool:
    """Whether it changes nothing but what one function does: no default, decorator or constant."""
    path, source, spot = error.located(root)
    if spot is None or path != root / PACKAGE / error.file:
        return False
    for way in pattern.symbols(source).get(error.symbol, []):
        node = pattern.Spot(way).nodes(pattern.parsed(source))[0]
        inside = spot.way[: len(way)] == way and len(spot.way) > len(way) and spot.way[len(way)][0] == "body"
        if inside and isinstance(node, ast.FunctionDef) and len(pattern.symbols(source)[error.symbol]) == 1:
            return True
    return False


def swap(file: str, symbol: str, source: str) -> None:
    """Give a function of the loaded package the code that it has in another source."""
    name = ".".join(["sage_grpo", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    found: object = importlib.import_module(name)
    for part in symbol.split("."):
        found = vars(found)[part]
    while not isinstance(found, FunctionType):
        found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None) or found.fget  # type: ignore[attr-defined]
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    codes = [code for code in _codes(compile(source, file, "exec", dont_inherit=True)) if code.co_qualname == symbol]
    (found.__code__,) = codes


def _codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *itertools.chain.from_iterable(map(_codes, inner))]


class Swaps:
    """A plugin for pytest: instead of running the collected tests once, run for every error of a group its own, up to the first that fails."""

    def __init__(self, group: Sequence[PlantedError], folder: Path, output: Path) -> None:
        """Lines of JSON go to `output`: the error's number, the test that failed and the seconds of a core."""
        self.group, self.folder, self.output = group, folder, output
        self.seconds: Mapping[str, float] = {}
        """How long the tests take on the tree as it is."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for each error."""
        for number, error in enumerate(self.group):
            pid = os.fork()
            if pid == 0:
                code = BROKEN
                try:
                    place, source = error.planted(self.folder)
                    swap(place.relative_to(PACKAGE).as_posix(), error.symbol, source)
                    items = {item.nodeid.removeprefix("tests/"): item for item in session.items}
                    self._run([items[test] for test in error.tests])
                    code = 0
                finally:
                    if sys.exc_info()[0]:
                        traceback.print_exc()
                    sys.stdout.flush()
                    os._exit(code)
            _, status, used = os.wait4(pid, 0)
            if os.waitstatus_to_exitcode(status) == BROKEN:
                continue  # tried again with the package imported anew
            failed = self._failed.read_text() if self._failed.exists() else ""
            if os.WIFSIGNALED(status):
                failed = failed or f"a test that ends the process ({signal.Signals(os.WTERMSIG(status)).name})"
            self._failed.unlink(missing_ok=True)
            with self.output.open("a") as stream:
                print(json.dumps([number, failed, used.ru_utime + used.ru_stime]), file=stream)
        return True

    @property
    def _failed(self) -> Path:
        return self.output.with_suffix(".failed")

    def _run(self, items: Sequence[pytest.Item]) -> None:
        for item, later in itertools.pairwise([*items, None]):
            assert item is not None
            # Seconds of a core, after which the process ends: an error may make a loop that has no end.
            signal.setitimer(signal.ITIMER_PROF, SECONDS + TIMES * self.seconds.get(item.nodeid, 0.0))
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=later)):
                self._failed.write_text(item.nodeid.removeprefix("tests/"))
                return
