"""The tests that run each line of the package, with their seconds: measured on the tree as it is, by coverage.py with a context for every test.

A generated error is tried by the tests that run its line, the quickest first. Code that runs in a fixture of a file or a session belongs to every
test of that file. Code that runs on import belongs to every test that runs any line of its module.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mutants.error import PACKAGE, PlantedError, places

BUDGET = 30.0
"""Seconds of tests that one error gets."""
LONGEST = 60.0
"""A test that takes longer on the tree as it is, is not used."""
OTHERS = ("mutants", "browser", "e2e", "typed")
"""Folders whose tests compute in other processes."""


@dataclass
class Reach:
    seconds: dict[str, float] = field(default_factory=dict)
    """The tests that pass, and how long each takes."""
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """File under the package -> line -> tests; the empty name is the import."""
    sources: dict[str, str] = field(default_factory=dict)
    """File -> a hash of its text. In a file that has changed since, every line counts as run by all tests of the file."""

    def write(self, path: Path) -> None:
        number = {name: index for index, name in enumerate(["", *self.seconds])}
        lines = {
            file: {line: sorted(number[name] for name in names if name in number) for line, names in rows.items()}
            for file, rows in self.lines.items()
        }
        path.write_text(json.dumps({"seconds": self.seconds, "lines": lines, "sources": self.sources}))

    def add(self, path: Path) -> None:
        stored = json.loads(path.read_text())
        names = ["", *stored["seconds"]]
        self.seconds |= stored["seconds"]
        self.sources |= stored["sources"]
        for file, rows in stored["lines"].items():
            for line, tests in rows.items():
                self.lines.setdefault(file, {}).setdefault(int(line), set()).update(names[test] for test in tests)

    def keep(self, seconds: dict[str, float]) -> None:
        self.seconds = {name: seconds[name] for name in self.seconds if name in seconds}
        for rows in self.lines.values():
            for line, names in rows.items():
                rows[line] = {name for name in names if not name or name in self.seconds}

    def tests(self, error: PlantedError, root: Path) -> tuple[str, ...]:
        """The tests for a generated error, the quickest first, as many as the budget allows; on import those of its room come first."""
        names, near = self.of(error, root), f"tests/{error.file.partition('/')[0]}/"
        if "" in names:
            files = {name.partition("::")[0] for names in self.lines[error.file].values() for name in names}
            names = {name for name in self.seconds if name.startswith(near) or name.partition("::")[0] in files}
        else:
            near = ""
        chosen, spent = [], 0.0
        for name in sorted(names, key=lambda name: (not name.startswith(near), self.seconds[name], name)):
            spent += self.seconds[name]
            if spent > BUDGET and chosen:
                break
            chosen.append(name.removeprefix("tests/"))
        return tuple(chosen)

    def of(self, error: PlantedError, root: Path) -> set[str]:
        _, source, number = error.located(root)
        place, rows = places(source)[number], self.lines.get(error.file, {})
        if digest(source) != self.sources.get(error.file):
            return set().union(*rows.values()) - {""}
        last = getattr(place.node, "end_lineno", place.line)
        return set().union(*(rows.get(line, ()) for line in range(place.line, last + 1)))


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


class Measure:
    """A plugin for pytest that measures seconds of tests, and with `lines` which lines each runs, and writes a Reach."""

    def __init__(self, folder: Path, output: Path, *, lines: bool, slow: bool) -> None:
        """slow: also the slow tests."""
        self.package, self.output, self.slow, self.coverage = folder / PACKAGE, output, slow, None
        if lines:
            import coverage

            self.coverage: Any = coverage.Coverage(data_file=None, config_file=False, source=[str(self.package)])
            self.coverage.start()  # before the package is imported: what runs then has the empty context
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.test = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.slow or not item.get_closest_marker("slow")]

    def _context(self, name: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A context for every test; a test that does not end is a failure."""

        def late(number: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"longer than {LONGEST} s")

        self.test = item.nodeid
        self._context(self.test)
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, LONGEST if self.coverage is not None else 0)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self._context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
        shared = fixturedef.scope != "function"
        if shared:
            self._context(self.test.partition("::")[0])
        try:
            return (yield)
        finally:
            if shared:
                self._context(self.test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        seconds = {name: value for name, value in self.seconds.items() if name not in self.failed}
        reach, files = Reach(seconds), {}
        for name in seconds:
            files.setdefault(name.partition("::")[0], []).append(name)
        if self.coverage is not None:
            self.coverage.stop()
            data = self.coverage.get_data()
            for file in data.measured_files():
                name = Path(file).relative_to(self.package).as_posix()
                reach.sources[name] = digest(Path(file).read_text(encoding="utf-8"))
                reach.lines[name] = {
                    line: {name for one in contexts for name in files.get(one, [one]) if not name or name in seconds}
                    for line, contexts in data.contexts_by_lineno(file).items()
                }
        reach.write(self.output)
