#!/usr/bin/env python3
"""The tests in every setting in which they must pass, and one table of what came out.

    scripts/test_matrix.py                                  # all settings, all tests: hours on two cores
    scripts/test_matrix.py --only portable --only shuffled-1
    scripts/test_matrix.py --only threads -- -m "not slow"  # after --, for pytest

A setting changes how numbers are rounded (other instructions, no oneDNN, two threads) or which test comes after which. What is compared
must not notice.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("-m", "pytest", "-q", "-p", "matrix_plugin", "--dist", "loadscope", "--no-loadscope-reorder")
"""As in the Makefile, with the plugin that reads SAGE_GRPO_MKLDNN and SAGE_GRPO_SHUFFLE."""
SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "without oneDNN": {"SAGE_GRPO_MKLDNN": "off"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "shuffled 1": {"SAGE_GRPO_SHUFFLE": "1"},
    "shuffled 2": {"SAGE_GRPO_SHUFFLE": "2"},
}
"""name -> what is in the environment besides OMP_NUM_THREADS=1."""


@dataclass(frozen=True)
class Outcome:
    """Result of one run of the tests."""

    setting: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Tests that failed, or why there is no result."""

    @property
    def row(self) -> str:
        """A line of the table."""
        return (
            f"| {self.setting} | {self.passed:,} | {self.failed} | {self.skipped} | {self.minutes:.1f} | {machine()} |"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the settings that were asked for; fails when a test failed in one of them."""
    options = _options(sys.argv[1:] if argv is None else argv)
    outcomes = []
    for name in options.only or SETTINGS:
        print(
            f"== {name}: {' '.join(f'{key}={value}' for key, value in SETTINGS[name].items()) or 'nothing changed'}",
            flush=True,
        )
        outcomes.append(run(name, options.jobs, options.rest))
    print("\n| setting | passed | failed | skipped | minutes | machine |\n|---|---|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row)
    for outcome in outcomes:
        for test in outcome.wrong:
            print(f"{outcome.setting}: {test}")
    return int(any(outcome.wrong for outcome in outcomes))


def run(name: str, jobs: int, rest: list[str]) -> Outcome:
    """The tests in one setting."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **SETTINGS[name]}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles torch and diffusers again
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "junit.xml"
        done = subprocess.run(
            [sys.executable, *COMMAND, "-n", str(jobs), f"--junitxml={told}", *rest],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        minutes = (time.monotonic() - start) / 60
        if not told.is_file() or done.returncode not in (0, 1):
            return Outcome(name, minutes=minutes, wrong=[f"pytest ended with {done.returncode} and without a result"])
        return read(name, told, minutes)


def read(name: str, told: Path, minutes: float) -> Outcome:
    """Counts from pytest's JUnit file."""
    cases = list(ElementTree.parse(told).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(
        name, passed=len(cases) - len(bad) - skipped, failed=len(bad), skipped=skipped, minutes=minutes,
        wrong=[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in bad],
    )  # fmt: skip


def machine() -> str:
    """The machine: architecture, its instructions as PyTorch names them, cores."""
    import torch

    return f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores, torch {torch.__version__}"


def _options(argv: list[str]) -> argparse.Namespace:
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name.replace(" ", "-"): name for name in SETTINGS}
    parser.add_argument(
        "--only", action="append", metavar="SETTING", help=f"one of {', '.join(names)}; may be given again"
    )
    parser.add_argument("--jobs", type=int, default=2, help="pytest workers")
    options = parser.parse_args(argv[:place])
    for name in options.only or []:
        if name not in names and name not in SETTINGS:
            parser.error(f"there is no setting {name!r}: {', '.join(names)}")
    options.only = [names.get(name, name) for name in options.only or []]
    options.rest = argv[place + 1 :]
    return options


if __name__ == "__main__":
    sys.exit(main())
