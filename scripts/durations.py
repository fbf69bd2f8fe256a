#!/usr/bin/env python3
"""A table of how long tests take, from what pytest wrote with --junitxml.

    make test PYTEST_OPTIONS=--junitxml=build/test.xml
    make test-slow PYTEST_OPTIONS=--junitxml=build/slow.xml
    scripts/durations.py "make test=build/test.xml" "make test-slow=build/slow.xml" > tests/durations.md

Seconds are those of one worker; two run side by side.
"""

from __future__ import annotations

import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

FILES, TESTS = 20, 30
"""How many of the slowest are shown."""


def main(arguments: list[str]) -> int:
    """Print the tables of every command that is given as name=file."""
    if not arguments or not all("=" in one for one in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    print(
        f"# How long the tests take\n\nBy `scripts/durations.py`, on {platform.machine()} with {os.cpu_count()} cores."
    )
    for one in arguments:
        name, _, file = one.partition("=")
        show(name, Path(file))
    return 0


def show(name: str, file: Path) -> None:
    """One command: the sum, its slowest files and its slowest tests."""
    suite = next(ElementTree.parse(file).iter("testsuite"))
    cases = [(_file(case), str(case.get("name")), float(case.get("time", 0))) for case in suite.iter("testcase")]
    by_file: dict[str, list[float]] = defaultdict(list)
    for path, _, seconds in cases:
        by_file[path].append(seconds)
    total = sum(seconds for _, _, seconds in cases)
    print(
        f"\n## `{name}`\n\n{len(cases):,} tests, {total:.0f} s of the workers, {float(suite.get('time', 0)):.0f} s in all."
    )
    print("\n| file | tests | seconds |\n|---|---|---|")
    for path, seconds in sorted(by_file.items(), key=lambda item: -sum(item[1]))[:FILES]:
        print(f"| {path} | {len(seconds)} | {sum(seconds):.1f} |")
    print("\n| test | seconds |\n|---|---|")
    for path, test, seconds in sorted(cases, key=lambda case: -case[2])[:TESTS]:
        print(f"| {path}::{test} | {seconds:.1f} |")


def _file(case: ElementTree.Element) -> str:
    return str(case.get("classname")).replace(".", "/") + ".py"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
