"""Plant errors, those of the tables and generated ones that are drawn by a seed, one at a time, and run the tests that should see it.

    python tests/mutants/plant.py [--jobs 2] [--only WORDS] [--draw 10] [--seed 7] [--rooms models] [--unlisted]
    python tests/mutants/plant.py --unlisted --reach build/reach.json                    # measure which tests run which lines
    python tests/mutants/plant.py --unlisted --reach build/reach.json --draw 100 --jobs 16 --limit-seconds 540 --json errors.jsonl

Errors are planted in temporary copies of the tree, one for each job, never in the tree itself. Libraries are imported once, in this process, and
every try is a fork of it that imports the package anew. Generated errors within functions are planted in groups: each is a fork of a process that
has the package and the tests already, in which one function has other code. First the tests run on the tree as it is: where a test of a listed
error fails, nothing is planted. That run also measures seconds: tests of an error run quickest first, up to the first that fails, so that this is
the cheapest test that notices it.
Exit status: 0 when every error was noticed, 1 when one survived, 2 when the tool could not do its work.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import gc
import importlib
import itertools
import json
import math
import os
import py_compile
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import error as errors_  # noqa: E402
from mutants.error import PACKAGE, PlantedError, places  # noqa: E402
from mutants.generate import drawn, room  # noqa: E402
from mutants.reach import OTHERS, Measure, Reach  # noqa: E402

LIMIT = 240.0
"""Seconds that one error may take."""
PATIENCE = 4800.0
"""Seconds that the tests may take on the tree as it is."""
SECONDS, TIMES = 3.0, 5.0
"""With a drawn error a test has so many seconds of a core, and so many times as long as without an error."""
WAITING = 8.0
"""And so many times as much by the clock: an error may make a wait that has no end."""
FOLDERS = ("src", "tests", "docs", "research", "examples", "scripts")
"""Folders that are copied, with the files of the first level."""
SURVIVED, NOTICED, LATE, BROKEN = "SURVIVED", "noticed", "TIMED OUT", "BROKEN"
GROUP = 12
"""Errors that are planted in one process."""
PARTS = 6
"""Into how many parts a job's tests are cut when they are measured: a part that takes long keeps the others waiting."""


class Trials:
    """A plugin for pytest: instead of running the collected tests once, run for every error its own, up to the first that fails."""

    def __init__(self, group: Sequence[PlantedError], seconds: Mapping[str, float], folder: Path, output: Path) -> None:
        """Lines of JSON go to `output`: the error's number, the test that failed and the seconds of a core."""
        self.group, self.seconds, self.folder, self.output = group, seconds, folder, output
        self.now = output.with_suffix(".now")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork for each error; of one that could not be planted, or with which a file of tests cannot be imported, there is no line."""
        if session.testsfailed and len(self.group) == 1:
            return True
        for number, error in enumerate(self.group):
            self.now.write_text("")
            pid = os.fork()
            if pid == 0:
                code = 3
                try:
                    if len(self.group) > 1:
                        swap(self.folder, error)
                    code = self._run(error, session.items)
                finally:
                    if sys.exc_info()[0]:
                        traceback.print_exc()
                    sys.stdout.flush()
                    os._exit(code)
            _, status, used = os.wait4(pid, 0)
            if os.waitstatus_to_exitcode(status) != 3:
                failed = self.now.read_text() if status else ""
                with self.output.open("a") as stream:
                    print(json.dumps([number, failed, used.ru_utime + used.ru_stime]), file=stream)
        return True

    def _run(self, error: PlantedError, items: Sequence[pytest.Item]) -> int:
        own = [item for item in items if any(_is_of(item.nodeid, f"tests/{test}") for test in error.tests)]
        own.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))
        for item, later in itertools.pairwise([*own, None]):
            assert item is not None
            self.now.write_text(item.nodeid.removeprefix("tests/"))
            if error.drawn:  # the process ends at the limit: an error may make a loop that has no end
                limit = SECONDS + TIMES * self.seconds.get(item.nodeid, 0.0)
                signal.setitimer(signal.ITIMER_PROF, limit)
                signal.setitimer(signal.ITIMER_REAL, limit * WAITING)
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=later)):
                return 1
        return 0


def _is_of(test: str, name: str) -> bool:
    return test == name or test.startswith((f"{name}[", f"{name}::"))


def can_be_swapped(error: PlantedError, root: Path) -> bool:
    """It changes nothing but what one function does: no default, decorator or constant."""
    path, source, number = error.located(root)
    place = places(source)[number]
    return place.inside and path == root / PACKAGE / error.file


def swap(folder: Path, error: PlantedError) -> None:
    """Give the functions of a loaded symbol the code that they have with the error in them."""
    place, source = error.planted(folder)
    new = {code.co_qualname: code for code in _codes(compile(source, place.name, "exec", dont_inherit=True))}
    name, found = error.symbol, 0
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == str(folder / place):
            known = one.__code__.co_qualname
            if known == name or known.startswith(f"{name}.<locals>"):
                one.__code__ = new[known]
                found += 1
    if not found:
        raise LookupError(f"{error.place} is not loaded.")


def _codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *itertools.chain.from_iterable(map(_codes, inner))]


@dataclass
class Try:
    tests: Sequence[str]
    plugin: Callable[[Path, Path], Trials | Measure]
    """Of the copy, and of the file that it writes."""
    group: Sequence[PlantedError] = ()
    """Errors to plant; one alone is written into the copy."""
    limit: float = PATIENCE
    folder: Path = Path()
    started: float = field(default_factory=time.monotonic)
    pid: int = 0
    original: tuple[Path, str] | None = None

    @property
    def answers(self) -> Path:
        return self.folder.with_suffix(".jsonl")

    @property
    def output(self) -> Path:
        return self.folder.with_suffix(".txt")

    def start(self) -> None:
        self.answers.unlink(missing_ok=True)
        if len(self.group) == 1:
            place, changed = self.group[0].planted(self.folder)
            self.original = self.folder / place, (self.folder / place).read_text(encoding="utf-8")
            (self.folder / place).write_text(changed, encoding="utf-8")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 3
            try:
                enter(self.folder, self.output)
                code = run_tests(self.folder, self.tests, self.plugin(self.folder, self.answers))
            finally:
                if sys.exc_info()[0]:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code of pytest, -1 at the time limit, None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() - self.started < self.limit:
            return None
        self.kill()
        if not done:
            os.waitpid(self.pid, 0)
        if self.original is not None:
            self.original[0].write_text(self.original[1], encoding="utf-8")
        return os.waitstatus_to_exitcode(status) if done else -1

    def kill(self) -> None:
        """End the fork and what its tests have started; they have a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def said(self) -> str:
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""


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
    others = [path for path in sys.path if Path(path or ".").resolve() != ROOT / "tests"]
    sys.path[:] = [str(folder / "src"), str(folder), *others]  # as `python -m pytest` in that folder has it
    for name in [name for name, module in sys.modules.items() if _of_the_tree(module)]:
        del sys.modules[name]  # the copy has its own
    vars(sys.modules["__main__"]).pop("__file__", None)  # else processes that tests start would import this script
    os.environ.update(PYTHONPATH=str(folder / "src"), TMPDIR=str(scratch))
    # Compiled files are checked against the source's text (copy_tree), and tests, which nobody changes here, are prepared by pytest once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    tempfile.tempdir = None
    os.chdir(folder)


def run_tests(folder: Path, tests: Sequence[str], plugin: Trials | Measure) -> int:
    """In the fork: pytest on a copy of the tree; returns its exit code."""
    package = importlib.import_module("sage_grpo")
    if not str(package.__file__).startswith(str(folder)):
        raise ImportError(f"The package came from {package.__file__}, not from the copy.")
    from hypothesis import HealthCheck, Phase, settings

    # The same examples every time, and none made smaller: that an error is noticed is enough.
    phases, slow = (Phase.explicit, Phase.generate), [HealthCheck.too_slow]
    settings.register_profile("planted", phases=phases, derandomize=True, deadline=None, suppress_health_check=slow)
    settings.load_profile("planted")
    options = ["-q", "--tb=line", "--disable-warnings", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    scratch = f"--basetemp={folder.with_suffix('.tmp') / 'pytest'}"
    return int(pytest.main([*options, scratch, *(f"tests/{test}" for test in tests)], plugins=[plugin]))


def _of_the_tree(module: object) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith((str(ROOT / "tests"), str(ROOT / "src"))) and module is not sys.modules["__main__"]


def import_libraries(root: Path) -> None:
    """Import what the package and its tests import from elsewhere, so that forks have it."""
    own = {path.stem for path in (root / "tests").rglob("*.py")} | {"sage_grpo", "trainer_zoo", "mutants"}
    wanted: dict[str, set[str]] = {}
    for file in [*(root / PACKAGE).rglob("*.py"), *(root / "tests").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                wanted.setdefault(node.module, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                wanted |= {alias.name: wanted.get(alias.name, set()) for alias in node.names}
    for module, names in wanted.items():
        if module.split(".")[0] not in own:
            # Optional packages may be missing, and names may be of another version.
            with contextlib.suppress(ImportError, AttributeError, RuntimeError):
                loaded = importlib.import_module(module)
                for name in names:
                    getattr(loaded, name)  # diffusers and transformers import when they are asked


@contextlib.contextmanager
def copies(root: Path, jobs: int) -> Iterator[list[Path]]:
    """A copy of what tests need for every job, and none afterwards; compiled files are checked against the source's text, not against its time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folders = [Path(place) / f"copy{number}" for number in range(jobs)]
        folders[0].mkdir()
        for path in root.iterdir():
            if path.name in FOLDERS:
                shutil.copytree(path, folders[0] / path.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            elif path.is_file():
                shutil.copy2(path, folders[0])
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folders[0], quiet=2, invalidation_mode=mode)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        yield folders


def finished(waiting: deque[Try], free: list[Path], deadline: float = math.inf) -> Iterator[tuple[Try, int]]:
    """Run tries, one per free copy at a time; yields each with its exit code. At the deadline those that run end, and none begins."""
    running: list[Try] = []
    free = list(free)
    try:
        while running or waiting:
            while free and waiting and time.monotonic() < deadline:
                one = waiting.popleft()
                one.folder, one.started = free.pop(), time.monotonic()
                one.limit = min(one.limit, deadline - one.started)
                one.start()
                running.append(one)
            if not running:
                return
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


def measured(
    tests: Sequence[str], folders: list[Path], parts: int, *, lines: bool, slow: bool, deadline: float = math.inf
) -> tuple[Reach, str]:
    """The seconds of tests on the tree as it is, with `lines` also which lines they run; and what failed."""
    reach, failed, start = Reach(), [], time.monotonic()

    def plugin(folder: Path, output: Path) -> Measure:
        return Measure(folder, output, lines=lines, slow=slow)

    waiting = deque(Try(tests[n::parts], plugin) for n in range(min(parts, len(tests))))
    count = len(waiting)
    for number, (one, code) in enumerate(finished(waiting, folders, deadline), 1):
        if one.answers.exists():
            reach.add(one.answers)
        if code not in (0, 5):  # 5: all are slow
            failed.append(f"pytest ended with {code}: {one.said()}")
        print(f"measured {number}/{count} parts, {time.monotonic() - start:.0f} s", flush=True)
    return reach, "\n".join(failed)


def grouped(errors: Sequence[PlantedError], folders: list[Path], reach: Reach) -> list[list[PlantedError]]:
    """Errors that are planted in one process, of one room; the rooms take turns, so that a time limit cuts none of them off."""
    size = max(2, min(GROUP, len(errors) // (3 * len(folders))))
    rooms: dict[str, list[list[PlantedError]]] = {}
    unfilled: dict[str, list[PlantedError]] = {}
    for error in errors:
        name = room(error.file)
        group = unfilled.get(name)
        if error.drawn and can_be_swapped(error, folders[0]) and "" not in reach.of(error, folders[0]):
            if group is None or len(group) == size:
                group = unfilled[name] = []
                rooms.setdefault(name, []).append(group)
            group.append(error)
        else:
            rooms.setdefault(name, []).append([error])
    return [group for turn in itertools.zip_longest(*rooms.values()) for group in turn if group]


def outcomes(
    errors: Sequence[PlantedError], folders: list[Path], reach: Reach, deadline: float = math.inf
) -> Iterator[tuple[PlantedError, str, str, float]]:
    """Every error that was tried before the deadline with its outcome, the test that failed (or those that did not), and seconds of a core."""

    def trying(group: Sequence[PlantedError]) -> Try:
        tests = sorted({test for error in group for test in error.tests})
        limit = LIMIT * len(group)
        return Try(tests, lambda folder, output: Trials(group, reach.seconds, folder, output), group, limit)

    place, last = {id(error): number for number, error in enumerate(errors)}, dict[str, int]()
    waiting = deque(map(trying, grouped([error for error in errors if error.tests], folders, reach)))
    for one, code in finished(waiting, folders, deadline):
        lines = one.answers.read_text().splitlines() if one.answers.exists() else []
        answers = {number: rest for number, *rest in map(json.loads, lines)}
        for number, error in enumerate(one.group):
            few = f"{error.tests[0]} and {len(error.tests) - 1} others" if len(error.tests) > 1 else error.tests[0]
            if number not in answers and time.monotonic() >= deadline:
                continue  # not tried
            last[room(error.file)] = max(place[id(error)], last.get(room(error.file), 0))
            if number in answers:
                failed, seconds = answers[number]
                yield error, NOTICED if failed else SURVIVED, failed or few, seconds
            elif len(one.group) > 1:
                waiting.append(trying([error]))  # again with the package imported anew
            elif code == -1:
                yield error, LATE, few, LIMIT
            else:
                yield error, NOTICED if error.drawn else BROKEN, f"the import: {one.said()[-300:]!r}", 0.0
    # As many of them as there was time for others of their room, so that the share of noticed ones is that of all.
    late = time.monotonic() >= deadline
    for error in errors:
        if not error.tests and (not late or place[id(error)] < last.get(room(error.file), 0)):
            yield error, SURVIVED, "no test runs it", 0.0


def plant(
    errors: Sequence[PlantedError],
    folders: list[Path],
    reach: Reach,
    deadline: float = math.inf,
    kept: Path | None = None,
) -> tuple[int, list[str]]:
    """Plant each error and print its outcome; returns how many were tried, and the lines of those that were not noticed.

    A line of JSON for each goes to the file `kept`.
    """
    bad, rooms, number = [], {}, 0
    for number, (error, word, test, seconds) in enumerate(outcomes(errors, folders, reach, deadline), 1):
        line = f"{word:9} {seconds:5.1f} s  {error.place}: {error.what}  [{test}]"
        print(f"{number:3}/{len(errors)} {line}", flush=True)
        noticed = word == NOTICED or (word == LATE and error.hangs)
        bad += [] if noticed else [line]
        if error.drawn:
            counts = rooms.setdefault(room(error.file), [0, 0])
            counts[0] += noticed
            counts[1] += 1
        if kept is not None:
            record = {"error": error.what, "place": error.place, "room": room(error.file), "drawn": error.drawn}
            record |= {"noticed": noticed, "outcome": word, "test": test, "seconds": round(seconds, 2)}
            record["test_seconds"] = reach.seconds.get(f"tests/{test}")
            with kept.open("a", encoding="utf-8") as stream:
                print(json.dumps(record), file=stream)
    for name, (noticed, count) in sorted(rooms.items()):
        print(f"{name}: {noticed} of {count} drawn errors noticed ({noticed / count:.0%})")
    return number, bad


def main(
    arguments: Sequence[str] | None = None, errors: Sequence[PlantedError] | None = None, root: Path = ROOT
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--jobs", type=int, default=2, help="how many errors are tried at a time")
    add("--only", default="", help="only listed errors whose place or description holds this text")
    add("--draw", type=int, default=0, help="how many generated errors of every room are drawn")
    add("--seed", type=int, help="by which they are drawn; a random one is printed")
    add("--rooms", default="", help="draw only in rooms (folders of the package) whose name holds this text")
    add("--reach", type=Path, help="keep which tests run which lines in this file, and read it where it is there")
    add("--limit-seconds", type=float, default=math.inf, help="after so many seconds no error is tried any more")
    add("--json", type=Path, help="write the outcomes to this file, a line of JSON for each error")
    add("--unlisted", action="store_true", help="leave the listed errors out")
    options = parser.parse_args(arguments)
    start, bad, tried = time.monotonic(), [], 0
    deadline = start + options.limit_seconds
    listed = [] if options.unlisted else list(errors_.listed() if errors is None else errors)
    listed = [error for error in listed if options.only.lower() in f"{error.place}: {error.what}".lower()]
    seed = random.randrange(10**6) if options.seed is None else options.seed
    sample = drawn(root, seed, options.draw, options.rooms) if options.draw else []
    stale = [fault for error in listed if (fault := error.fault(root))]
    if stale or not (listed or sample or options.reach):
        print("\n".join(["The tables do not fit the source any more:", *stale] if stale else ["No such error."]))
        return 2
    import_libraries(root)
    if options.json:
        options.json.write_text("")
    with copies(root, max(1, options.jobs)) as folders:
        print(f"{len(folders)} copies are ready ({time.monotonic() - start:.0f} s).", flush=True)
        if listed:
            tests = sorted({test for error in listed for test in error.tests})
            reach, wrong = measured(tests, folders, len(folders), lines=False, slow=True, deadline=deadline)
            if wrong:
                print(f"The tests do not pass on the tree as it is, so they would say nothing about errors:\n{wrong}")
                return 2
            print(f"The tree as it is passes ({time.monotonic() - start:.0f} s).", flush=True)
            tried, bad = plant(listed, folders, reach, deadline, options.json)
        if sample or not listed:
            reach = _reached(root, folders, options.reach, deadline)
            print(f"{len(reach.seconds)} tests measured ({time.monotonic() - start:.0f} s).", flush=True)
            print(f"Drawn by --seed {seed} --draw {options.draw}:", flush=True)
            sample = [replace(error, tests=reach.tests(error, root)) for error in sample]
            count, more = plant(sample, folders, reach, deadline, options.json)
            tried, bad = tried + count, bad + more
    missing = len(listed) + len(sample) - tried
    late = f", {missing} not tried within --limit-seconds {options.limit_seconds:.0f}" if missing else ""
    print(f"{tried} errors planted, {len(bad)} not noticed{late}, {time.monotonic() - start:.0f} s.")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


def _reached(root: Path, folders: list[Path], kept: Path | None, deadline: float) -> Reach:
    """The tests that run each line. Lines that were kept are not measured again, but the tests must pass here, too."""
    files = [
        path for path in (root / "tests").rglob("test_*.py") if path.relative_to(root / "tests").parts[0] not in OTHERS
    ]
    files.sort(key=lambda path: -path.stat().st_size)  # the longest first
    names = [path.relative_to(root / "tests").as_posix() for path in files]
    known = kept is not None and kept.exists()
    reach, failed = measured(names, folders, PARTS * len(folders), lines=not known, slow=False, deadline=deadline)
    if failed:
        print(f"Some tests fail on the tree as it is and are not used: {failed}", flush=True)
    if known:
        seconds = reach.seconds
        reach = Reach()
        reach.add(kept)
        reach.keep(seconds)
    elif kept is not None and time.monotonic() < deadline:
        reach.write(kept)
    return reach


if __name__ == "__main__":
    # A thread for each job, and no accelerator, which forks cannot share: torch reads these when it is imported.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    sys.exit(main())
