"""Plant errors, those of the tables and generated ones that are drawn by a seed, one at a time, and run the tests that should see it.

    python tests/mutants/plant.py [--jobs 2] [--only WORDS] [--draw 10] [--seed 7] [--rooms models] [--unlisted] [--list]

Errors are planted in temporary copies of the tree, never in the tree itself. Libraries are imported once, in this process, and every
try is a fork of it that imports the package anew. First the same tests run on the tree as it is: where one of them fails, or the
tables do not fit the source any more, nothing is planted. That run also says which tests are quick: those of an error run quickest
first, up to the first that fails. Exit status: 0 when every error was noticed, 1 when one survived, 2 when the tool could not do its work.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import json
import os
import py_compile
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.error import PACKAGE, PlantedError  # noqa: E402
from mutants.generate import drawn, room  # noqa: E402
from mutants.reach import OTHERS, Measure, Reach  # noqa: E402
from mutants.swap import Swaps, can_be_swapped  # noqa: E402
from mutants.tables import MUTANTS  # noqa: E402

if TYPE_CHECKING:
    import pytest

LIMIT = 240.0
"""Seconds that the tests of one error may take."""
PATIENCE = 4800.0
"""Seconds that the tests may take on the tree as it is."""
COPIED = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "constraints.txt",
)
SURVIVED, NOTICED, LATE_WORD = "SURVIVED", "noticed", "TIMED OUT"
WORDS = {0: SURVIVED, 1: NOTICED}
"""Exit codes of pytest; all others mean that the tests did not run."""
UNIMPORTABLE = (2, 4)
"""Exit codes of pytest where a generated error keeps the package from being imported."""
LATE = (-1, -signal.SIGXCPU)
"""Exit codes of a try that ran into a limit."""
GROUP = 12
"""Errors that are planted in one process."""
PARTS = 6
"""Into how many parts a job's tests are cut when they are measured: a part that takes long keeps the others waiting."""


@dataclass
class Try:
    """Tests that run in a fork of this process, in a copy of the tree."""

    tests: Sequence[str]
    error: PlantedError | None = None
    group: Sequence[PlantedError] = ()
    """Errors that are planted one after the other in forks of the fork (swap.py)."""
    measures: str = ""
    """Only measure which lines the tests run (reach.py): "quick" ones, or "all"."""
    folder: Path = Path()
    started: float = field(default_factory=time.monotonic)
    pid: int = 0
    cpu: float = 0.0
    """Seconds that it took of a core, with the processes that its tests started."""
    place: Path = Path()
    original: str = ""

    @property
    def answers(self) -> Path:
        """What became of the errors of a group."""
        return self.folder.with_suffix(".jsonl")

    @property
    def reach(self) -> Path:
        """What was measured."""
        return self.folder.with_suffix(".reach")

    @property
    def output(self) -> Path:
        """What pytest said."""
        return self.folder.with_suffix(".txt")

    def start(self) -> None:
        """Plant the error and fork."""
        if self.error is not None:
            place, changed = self.error.planted(self.folder)
            self.place = self.folder / place
            self.original = self.place.read_text(encoding="utf-8")
            self.place.write_text(changed, encoding="utf-8")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 3
            try:
                if self.error is not None and self.error.cpu_limit:
                    resource.setrlimit(resource.RLIMIT_CPU, (self.error.cpu_limit, resource.RLIM_INFINITY))
                code = self._run()
            finally:
                if sys.exc_info()[0]:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)

    def _run(self) -> int:
        """In the fork: the exit code of pytest."""
        enter(self.folder, self.output)
        if self.measures:
            return run_tests(self.folder, [self.tests], Measure(self.folder, self.reach, self.measures == "all"))
        if self.group:
            return run_tests(self.folder, [self.tests], Swaps(self.group, self.folder, self.answers))
        if self.error is None or self.error.cpu_limit:
            return run_tests(self.folder, [self.tests])
        return run_tests(self.folder, [[test] for test in self.tests])  # later ones are collected where they are needed

    def poll(self) -> int | None:
        """The exit code of pytest, -1 at the time limit, None while it runs."""
        done, status, used = os.wait4(self.pid, os.WNOHANG)
        late = time.monotonic() - self.started > (LIMIT if self.error else PATIENCE)
        if not done and not late:
            return None
        self.kill()
        if not done:
            _, _, used = os.wait4(self.pid, 0)
        self.cpu = used.ru_utime + used.ru_stime
        return os.waitstatus_to_exitcode(status) if done else -1

    def kill(self) -> None:
        """End the fork and what its tests have started; they have a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def restore(self) -> None:
        """Take the error out again. The tree that was copied may have moved on since."""
        if self.error is not None:
            self.place.write_text(self.original, encoding="utf-8")

    def first_failure(self) -> str:
        """The test that failed, or the end of what pytest said."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].removeprefix("tests/") if failed else " | ".join(lines[-3:])


class Order:
    """A plugin for pytest: it measures tests on the tree as it is, and has the quickest run first afterwards, none twice."""

    def __init__(self, folder: Path, first: str) -> None:
        """Each copy of the tree has a file of its own; all are read. Tests of `first` may take longer than others."""
        self.first = f"tests/{first}"
        self.file = folder.with_suffix(".json")
        self.seconds: dict[str, float] = {}
        for file in folder.parent.glob("*.json"):
            self.seconds |= json.loads(file.read_text())
        self.measures = not self.seconds
        self.done: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The setup of a test counts: what a session shares would be paid for by the first that needs it."""
        self.done.add(report.nodeid)
        if self.measures:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """After every other plugin has put the tests into an order."""
        if not self.measures:
            session.items[:] = [item for item in session.items if item.nodeid not in self.done]
            session.items.sort(key=self._place)

    def _place(self, item: pytest.Item) -> float:
        """The module's own tests are likelier to notice."""
        return self.seconds.get(item.nodeid, 0.0) * (0.2 if item.nodeid.startswith(self.first) else 1.0)

    def pytest_sessionfinish(self) -> None:
        """Leave the times for the tries that follow."""
        if self.measures:
            self.file.write_text(json.dumps(self.seconds))


def enter(folder: Path, output: Path) -> None:
    """In the fork: become a process of that copy of the tree."""
    os.setsid()
    scratch = folder.with_suffix(".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a test of this tool captures the others
    sys.path[:] = [str(folder / "src"), *(path for path in sys.path if Path(path or ".").resolve() != ROOT / "tests")]
    for name in [name for name, module in sys.modules.items() if _of_the_tree(module)]:
        del sys.modules[name]  # the copy has its own
    vars(sys.modules["__main__"]).pop("__file__", None)  # else processes that tests start would import this script
    os.environ.update(PYTHONPATH=str(folder / "src"), TMPDIR=str(scratch))
    # Compiled files are checked against the source's text (copy_tree), and tests, which nobody changes here, are prepared by pytest once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    tempfile.tempdir = None
    os.chdir(folder)


def run_tests(folder: Path, parts: Sequence[Sequence[str]], plugin: Swaps | Measure | None = None) -> int:
    """In the fork: pytest on a copy of the tree, part by part up to the first that fails; returns its exit code."""
    package = importlib.import_module("sage_grpo")
    if not str(package.__file__).startswith(str(folder)):
        print(f"The package came from {package.__file__}, not from the copy.")
        return 3
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    # The same examples every time, and none made smaller: that an error is noticed is enough.
    settings.register_profile(
        "planted",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("planted")
    order = Order(folder, parts[0][0])
    if isinstance(plugin, Swaps):
        plugin.seconds = order.seconds
    scratch = folder.with_suffix(".tmp") / "pytest"
    options = [
        "-q",
        "--no-header",
        "--tb=line",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
        f"--basetemp={scratch}",
    ]
    plugins = [plugin] if isinstance(plugin, Measure) else [order, *([plugin] if plugin else [])]
    options += [] if order.measures or isinstance(plugin, Measure) else ["-x"]
    for part in parts:
        paths = [f"tests/{test}" for test in part]
        code = int(pytest.main([*options, *paths], plugins=plugins))
        if code not in (0, 5) or (code == 5 and not order.done):  # 5: all of them have run before
            return code
    return 0


def _of_the_tree(module: object) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith((str(ROOT / "tests"), str(ROOT / "src"))) and module is not sys.modules["__main__"]


def import_libraries(root: Path) -> None:
    """Import what the package and its tests import from elsewhere, so that forks have it."""
    own = {path.stem for path in (root / "tests").rglob("*.py")} | {"sage_grpo", "trainer_zoo", "mutants"}
    for file in [*(root / PACKAGE).rglob("*.py"), *(root / "tests").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                _import(node.module, names, own)
            elif isinstance(node, ast.Import):
                for name in names:
                    _import(name, [], own)


def _import(module: str, names: list[str], own: set[str]) -> None:
    if module.split(".")[0] in own:
        return
    # Optional packages may be missing, and names may be of another version.
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name)  # diffusers and transformers import when they are asked


def copy_tree(source: Path, target: Path) -> None:
    """A copy of what tests need; compiled files in it are checked against the source's text, not against its time."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif (source / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(target, quiet=2, invalidation_mode=mode)


@contextlib.contextmanager
def copies(root: Path, jobs: int) -> Iterator[list[Path]]:
    """One copy of the tree for every job, and none afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folders = [Path(place) / f"copy{number}" for number in range(jobs)]
        copy_tree(root, folders[0])
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        yield folders


def finished(waiting: Iterator[Try], free: list[Path]) -> Iterator[tuple[Try, int]]:
    """Run tries, one per free copy at a time; yields each with its exit code."""
    running: list[Try] = []
    exhausted = False
    try:
        while running or not exhausted:
            while free and not exhausted:
                one = next(waiting, None)
                exhausted = one is None
                if one is not None:
                    one.folder, one.started = free.pop(), time.monotonic()
                    one.start()
                    running.append(one)
            for one in list(running):
                code = one.poll()
                if code is not None:
                    running.remove(one)
                    yield one, code
                    free.append(one.folder)
            time.sleep(0.02)
    finally:  # an interrupt does not reach forks in sessions of their own
        for one in running:
            one.kill()


def check_baseline(errors: Sequence[PlantedError], folders: list[Path]) -> list[str]:
    """Run all tests of the errors on the tree as it is; returns what is wrong."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for error in errors for test in error.tests):
        files.setdefault(test.split("::")[0], []).append(test)
    parts: list[list[str]] = [[] for _ in folders]
    for number, tests in enumerate(files.values()):
        parts[number % len(parts)] += tests
    wrong = []
    for one, code in finished(iter([Try(part) for part in parts if part]), list(folders)):
        if code != 0:
            wrong.append(f"pytest ended with {code}: {one.first_failure()}\n{one.output.read_text()[-3000:]}")
    return wrong


def measured(root: Path, folders: list[Path], tests: str, kept: Path | None = None) -> Reach:
    """The tests that run each line, of "quick" or "all" tests on the tree as it is."""
    files = [path.relative_to(root / "tests").as_posix() for path in sorted((root / "tests").rglob("test_*.py"))]
    files = [file for file in files if file.partition("/")[0] not in OTHERS]
    count = PARTS * len(folders)
    reach = Reach()
    if kept is not None and kept.exists():
        reach.add(kept)
        files = []
    parts = [part for number in range(count) if (part := files[number::count])]
    for one, code in finished(iter([Try(part, measures=tests) for part in parts]), list(folders)):
        if one.reach.exists():
            reach.add(one.reach)
            one.reach.unlink()
        if code != 0:
            print(f"Some tests fail on the tree as it is and are not used: {one.first_failure()}", flush=True)
    if kept is not None:
        reach.write(kept)
    (folders[0].parent / "seconds.json").write_text(json.dumps(reach.seconds))
    return reach


def swapped(groups: Iterable[Sequence[PlantedError]], folders: list[Path]) -> Iterator[tuple[PlantedError, str, float]]:
    """Try errors within functions in groups (swap.py): each with the test that failed, if any, and the seconds of a core."""
    tries = [Try(sorted({test for error in group for test in error.tests}), group=group) for group in groups]
    for one, _ in finished(iter(tries), list(folders)):
        for line in one.answers.read_text().splitlines() if one.answers.exists() else ():
            number, failed, seconds = json.loads(line)
            yield one.group[number], failed, seconds
        one.answers.unlink(missing_ok=True)


def plant(errors: Sequence[PlantedError], folders: list[Path], reach: Reach | None = None) -> list[str]:
    """Plant each error and print what became of it; returns the lines of those that were not noticed.

    Generated errors have the tests that `reach` gives them.
    """
    bad, rooms = [], {}
    tries = outcomes(errors, folders, reach)
    for number, (error, word, test, seconds) in enumerate(tries, 1):
        line = f"{word:9} {seconds:5.1f} s  {error.place}: {error.what}  [{test}]"
        print(f"{number:3}/{len(errors)} {line}", flush=True)
        noticed = word == NOTICED or (word == LATE_WORD and error.hangs)
        bad += [] if noticed else [line]
        if error.cpu_limit:
            counts = rooms.setdefault(room(error.file), [0, 0])
            counts[0] += noticed
            counts[1] += 1
    for name, (noticed, count) in sorted(rooms.items()):
        print(f"{name}: {noticed} of {count} drawn errors noticed ({noticed / count:.0%})")
    return bad


def outcomes(
    errors: Sequence[PlantedError], folders: list[Path], reach: Reach | None
) -> Iterator[tuple[PlantedError, str, str, float]]:
    """Every error with what became of it, the test that failed (or those that did not), and seconds of a core."""
    left = list(errors)
    if reach is not None:
        quick = [
            one
            for one in left
            if one.tests and can_be_swapped(one, folders[0]) and not reach.on_import(one, folders[0])
        ]
        for error, failed, seconds in swapped([quick[n : n + GROUP] for n in range(0, len(quick), GROUP)], folders):
            left.remove(error)
            yield error, NOTICED if failed else SURVIVED, failed or _few(error.tests), seconds
        for error in [one for one in left if not one.tests]:
            left.remove(error)
            yield error, SURVIVED, "no test runs it", 0.0
    for one, code in finished(iter([Try(error.tests, error) for error in left]), list(folders)):
        assert one.error is not None
        one.restore()
        fails_on_import = code in UNIMPORTABLE and one.error.cpu_limit
        word = LATE_WORD if code in LATE else NOTICED if fails_on_import else WORDS.get(code, f"BROKEN (pytest {code})")
        yield one.error, word, one.first_failure() if code else _few(one.tests), one.cpu


def _few(tests: Sequence[str]) -> str:
    return ", ".join(tests[:2]) + (f" and {len(tests) - 2} others" if len(tests) > 2 else "")


def main(
    arguments: Sequence[str] | None = None, errors: Sequence[PlantedError] | None = None, root: Path = ROOT
) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="how many errors are tried at a time")
    parser.add_argument("--only", default="", help="only listed errors whose place or description holds this text")
    parser.add_argument("--draw", type=int, default=0, help="how many generated errors of every room are drawn")
    parser.add_argument("--seed", type=int, help="by which they are drawn; a random one is printed")
    parser.add_argument(
        "--rooms", default="", help="draw only in rooms (folders of the package) whose name holds this text"
    )
    parser.add_argument(
        "--tests", choices=["quick", "all"], default="quick", help="which tests shall notice the drawn ones"
    )
    parser.add_argument(
        "--reach", type=Path, help="keep what the tests run in this file, and read it where it is there"
    )
    parser.add_argument("--unlisted", action="store_true", help="leave the listed errors out")
    parser.add_argument("--list", action="store_true", help="only list the errors")
    options = parser.parse_args(arguments)
    listed = [] if options.unlisted else list(MUTANTS if errors is None else errors)
    listed = [error for error in listed if options.only.lower() in f"{error.place}: {error.what}".lower()]
    seed = random.randrange(10**6) if options.seed is None else options.seed
    sample = drawn(root, seed, options.draw, options.rooms) if options.draw else []
    stale = [fault for error in listed if (fault := error.fault(root))]
    if stale or not (listed or sample):
        print("\n".join(["The tables do not fit the source any more:", *stale] if stale else ["No such error."]))
        return 2
    if options.list:
        print("\n".join(f"{error.place}: {error.what}" for error in [*listed, *sample]))
        return 0
    start, before = time.monotonic(), _cpu()
    import_libraries(root)
    with copies(root, max(1, options.jobs)) as folders:
        wrong = check_baseline(listed, folders)
        if wrong:
            print(
                "The tests do not pass on the tree as it is, so they would say nothing about errors:", *wrong, sep="\n"
            )
            return 2
        print(f"The tree as it is passes ({_cpu() - before:.0f} s of a core).", flush=True)
        bad = plant(listed, folders)
        if sample:
            print(f"Drawn by --seed {seed} --draw {options.draw}:", flush=True)
            reach = measured(root, folders, options.tests, options.reach)
            print(f"{len(reach.seconds)} tests measured ({time.monotonic() - start:.0f} s).", flush=True)
            bad += plant(list(reach.aim(sample, root)), folders, reach)
    took = f"{time.monotonic() - start:.0f} s, {_cpu() - before:.0f} s of a core"
    print(f"{len(listed) + len(sample)} errors planted, {len(bad)} not noticed, {took}.")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


def _cpu() -> float:
    """Seconds of a core, of this process and those that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
