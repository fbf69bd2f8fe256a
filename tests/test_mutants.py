"""The tables of planted errors fit the source, and the tool that plants them tells noticed errors from those that survive.

The errors themselves are planted by `make mutants`, not here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from mutants.mutant import PACKAGE, Mutant
from mutants.tables import MUTANTS

ROOT = Path(__file__).resolve().parent.parent


@cache
def _tests_in(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_error_can_be_planted() -> None:
    """Text that is there exactly once, and source that is still Python afterwards."""
    problems = [f"{mutant.what}: {fault}" for mutant in MUTANTS if (fault := mutant.fault(ROOT))]
    assert not problems, "\n".join(["Bring tests/mutants up to date:", *problems])
    for mutant in MUTANTS:
        ast.parse(mutant.source(ROOT), filename=mutant.what)


def test_every_error_names_tests_that_exist() -> None:
    problems = []
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            if not _tests_in(file) or (name and name.split("[")[0] not in _tests_in(file)):
                problems.append(f"{mutant.what}: there is no tests/{test}")
    assert not problems, "\n".join(problems)
    assert all(mutant.tests for mutant in MUTANTS)


def test_the_errors_are_many_and_each_is_another() -> None:
    assert len(MUTANTS) >= 50
    assert not [key for key, count in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if count > 1]
    assert not [what for what, count in Counter(m.what for m in MUTANTS).items() if count > 1]


def test_an_error_that_does_not_fit_says_so(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir(parents=True)
    (tmp_path / PACKAGE / "sums.py").write_text("a = 1\nb = 1\n")
    assert Mutant("", "sums.py", "a = 1", "a = 2", ()).fault(tmp_path) is None
    assert "2 times" in str(Mutant("", "sums.py", "= 1", "= 2", ()).fault(tmp_path))
    assert "0 times" in str(Mutant("", "sums.py", "c = 1", "c = 2", ()).fault(tmp_path))
    assert "0 times" in str(Mutant("", "gone.py", "a = 1", "a = 2", ()).fault(tmp_path))
    assert "nothing would change" in str(Mutant("", "sums.py", "a = 1", "a = 1", ()).fault(tmp_path))


SUMS = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
TESTS = """from sage_grpo.sums import add, double


def test_add():
    assert add(1, 2) == 3


def test_double():
    assert double(0) == 0
"""
DRIVER = """import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from mutants import plant
from mutants.mutant import Mutant

plant.LIMIT = 4.0
noticed = Mutant("adds wrongly", "sums.py", "a + b", "a - b", ("test_sums.py::test_add",))
survives = Mutant("does not double", "sums.py", "2 * a", "a", ("test_sums.py::test_double",))
gone = Mutant("no such test", "sums.py", "a + b", "a - b", ("test_sums.py::test_gone",))
sleep = "__import__('time').sleep(600)"
slow = Mutant("sleeps", "sums.py", "return a + b", f"return {sleep}", noticed.tests)
hangs = Mutant("sleeps, as it must", "sums.py", "return a + b", f"return {sleep}", noticed.tests, hangs=True)
known = {"noticed": noticed, "survives": survives, "gone": gone, "slow": slow, "hangs": hangs}
chosen = [known[name] for name in sys.argv[3:]]
sys.exit(plant.main([], chosen, Path(sys.argv[2])))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of a few lines, with tests of which one says little."""
    root = tmp_path / "tree"
    (root / PACKAGE).mkdir(parents=True)
    (root / "tests").mkdir()
    (root / PACKAGE / "__init__.py").write_text('"""A package."""\n')
    (root / PACKAGE / "sums.py").write_text(SUMS)
    (root / "tests" / "test_sums.py").write_text(TESTS)
    return root


def plant(tree: Path, *names: str) -> tuple[int, str]:
    driver = tree.parent / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), str(ROOT / "tests"), str(tree), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_survivors_are_named_and_fail_the_command(tree: Path) -> None:
    code, said = plant(tree, "noticed", "survives")
    assert code == 1, said
    assert "2 errors planted, 1 not noticed" in said
    assert said.splitlines()[-1].startswith("SURVIVED")
    assert "does not double" in said.splitlines()[-1]
    assert (tree / PACKAGE / "sums.py").read_text() == SUMS  # planted in a copy
    code, said = plant(tree, "noticed")
    assert code == 0, said
    assert "test_sums.py::test_add" in said


def test_a_tree_whose_tests_fail_is_refused(tree: Path) -> None:
    (tree / PACKAGE / "sums.py").write_text(SUMS.replace("return 2 * a", "return 2 * a + 1"))
    code, said = plant(tree, "noticed", "survives")
    assert code == 2, said
    assert "do not pass on the tree as it is" in said
    assert "test_double" in said
    code, said = plant(tree, "gone")  # a test that is not there notices nothing
    assert code == 2, said


def test_an_error_that_hangs_is_noticed_only_where_that_is_stated(tree: Path) -> None:
    code, said = plant(tree, "slow", "hangs")
    assert code == 1, said
    assert "2 errors planted, 1 not noticed" in said
    assert said.splitlines()[-1].startswith("TIMED OUT")
    assert "sleeps, as it must" not in said.splitlines()[-1]
