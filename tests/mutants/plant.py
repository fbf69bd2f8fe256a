"""Plant every error of the tables, one at a time, and run the tests that should see it.

    python tests/mutants/plant.py [--jobs 2] [--only WORDS] [--list]

Errors are planted in temporary copies of the tree, never in the tree itself. Libraries are imported once, in this process, and every
try is a fork of it that imports the package anew. First the same tests run on the tree as it is: where one of them fails, or the
tables do not fit the source any more, nothing is planted. Exit status: 0 when every error was noticed, 1 when one survived, 2 when the
tool could not do its work.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.mutant import PACKAGE, Mutant  # noqa: E402
from mutants.tables import MUTANTS  # noqa: E402

LIMIT = 240.0
"""Seconds that the tests of one error may take."""
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
WORDS = {0: "SURVIVED", 1: "noticed"}
"""Exit codes of pytest; all others mean that the tests did not run."""


@dataclass
class Try:
    """Tests that run in a fork of this process, in a copy of the tree."""

    folder: Path
    tests: Sequence[str]
    mutant: Mutant | None = None
    options: tuple[str, ...] = ("-x",)
    started: float = field(default_factory=time.monotonic)
    pid: int = 0
    original: str = ""

    @property
    def output(self) -> Path:
        """What pytest said."""
        return self.folder.with_suffix(".txt")

    def start(self) -> None:
        """Plant the error and fork."""
        if self.mutant is not None:
            place = self.folder / PACKAGE / self.mutant.file
            self.original = place.read_text(encoding="utf-8")
            place.write_text(self.mutant.source(self.folder), encoding="utf-8")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 3
            try:
                code = run_tests(self.folder, self.tests, self.options, self.output)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code of pytest, -1 at the time limit, None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.started > LIMIT * (1 if self.mutant else 20)
        if not done and not late:
            return None
        self.kill()
        if not done:
            os.waitpid(self.pid, 0)
            return -1
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """End the fork and what its tests have started; they have a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def restore(self) -> None:
        """Take the error out again. The tree that was copied may have moved on since."""
        if self.mutant is not None:
            (self.folder / PACKAGE / self.mutant.file).write_text(self.original, encoding="utf-8")

    def first_failure(self) -> str:
        """The test that failed, or the end of what pytest said."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].removeprefix("tests/") if failed else " | ".join(lines[-3:])


def run_tests(folder: Path, tests: Sequence[str], options: Sequence[str], output: Path) -> int:
    """In the fork: pytest on a copy of the tree; returns its exit code."""
    os.setsid()
    scratch = folder.with_suffix(".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)
    sys.path[:] = [str(folder / "src"), *(path for path in sys.path if Path(path or ".").resolve() != ROOT / "tests")]
    for name in [name for name in sys.modules if name.split(".")[0] == "mutants"]:
        del sys.modules[name]
    vars(sys.modules["__main__"]).pop("__file__", None)  # else processes that tests start would import this script
    os.environ.update(PYTHONPATH=str(folder / "src"), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(scratch))
    sys.dont_write_bytecode = True
    tempfile.tempdir = None
    os.chdir(folder)
    package = importlib.import_module("sage_grpo")
    if not str(package.__file__).startswith(str(folder)):
        print(f"The package came from {package.__file__}, not from the copy.")
        return 3
    import pytest

    common = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={scratch / 'pytest'}"]
    return int(pytest.main([*common, *options, *(f"tests/{test}" for test in tests)]))


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
        for folder in folders:
            copy_tree(root, folder)
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


def check_baseline(mutants: Sequence[Mutant], folders: list[Path]) -> list[str]:
    """Run all tests of the tables on the tree as it is; returns what is wrong."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
        files.setdefault(test.split("::")[0], []).append(test)
    parts: list[list[str]] = [[] for _ in folders]
    for number, tests in enumerate(files.values()):
        parts[number % len(parts)] += tests
    tries = iter([Try(Path(), part, options=()) for part in parts if part])
    wrong = []
    for one, code in finished(tries, list(folders)):
        if code != 0:
            wrong.append(f"pytest ended with {code}: {one.first_failure()}\n{one.output.read_text()[-3000:]}")
    return wrong


def plant(mutants: Sequence[Mutant], folders: list[Path]) -> list[str]:
    """Plant each error and print what became of it; returns the lines of those that were not noticed."""
    bad = []
    waiting = iter([Try(Path(), mutant.tests, mutant) for mutant in mutants])
    for number, (one, code) in enumerate(finished(waiting, list(folders)), 1):
        mutant = one.mutant
        assert mutant is not None
        one.restore()
        noticed = code == 1 or (code == -1 and mutant.hangs)
        word = "TIMED OUT" if code == -1 else WORDS.get(code, f"BROKEN (pytest {code})")
        line = f"{word:9} {time.monotonic() - one.started:5.1f} s  {mutant.file}: {mutant.what}"
        line += f"  [{one.first_failure()}]" if code else f"  [{', '.join(mutant.tests)}]"
        print(f"{number:3}/{len(mutants)} {line}", flush=True)
        if not noticed:
            bad.append(line)
    return bad


def main(arguments: Sequence[str] | None = None, mutants: Sequence[Mutant] = MUTANTS, root: Path = ROOT) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="how many errors are tried at a time")
    parser.add_argument("--only", default="", help="only errors whose file or description holds this text")
    parser.add_argument("--list", action="store_true", help="only list the errors")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in mutants if options.only.lower() in f"{mutant.file}: {mutant.what}".lower()]
    stale = [fault for mutant in chosen if (fault := mutant.fault(root))]
    if stale or not chosen:
        print("\n".join(["The tables do not fit the source any more:", *stale] if stale else ["No such error."]))
        return 2
    if options.list:
        print("\n".join(f"{mutant.file}: {mutant.what}" for mutant in chosen))
        return 0
    start = time.monotonic()
    import_libraries(root)
    with copies(root, max(1, options.jobs)) as folders:
        wrong = check_baseline(chosen, folders)
        if wrong:
            print(
                "The tests do not pass on the tree as it is, so they would say nothing about errors:", *wrong, sep="\n"
            )
            return 2
        print(f"The tree as it is passes ({time.monotonic() - start:.0f} s).", flush=True)
        bad = plant(chosen, folders)
    print(f"{len(chosen)} errors planted, {len(bad)} not noticed, {time.monotonic() - start:.0f} s.")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
