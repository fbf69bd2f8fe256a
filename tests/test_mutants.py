"""Planted errors fit the source, also after it was moved about, and the tool that plants them tells noticed errors from survivors.

The errors themselves are planted by `make mutants`, not here.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import slowly
from mutants import generate, pattern, plant, swap, tables
from mutants.error import PACKAGE, PlantedError
from mutants.tables import MUTANTS

ROOT = Path(__file__).resolve().parent.parent


@cache
def _tests_in(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


# The tables


def test_every_error_can_be_planted() -> None:
    """Its symbol and pattern are found, once, and another program comes out."""
    problems = [fault for error in MUTANTS if (fault := error.fault(ROOT))]
    assert not problems, "\n".join(["Bring the tables in tests/mutants up to date:", *problems])


def test_every_error_names_tests_that_exist() -> None:
    problems = []
    for error in MUTANTS:
        for test in error.tests:
            file, _, name = test.partition("::")
            known = _tests_in(ROOT / "tests" / file)
            if not known or (name and name.split("[")[0] not in known):
                problems.append(f"{error.what}: there is no tests/{test}")
    assert not problems, "\n".join(problems)
    assert all(error.tests for error in MUTANTS)


def test_cases_that_are_listed_as_slow_exist() -> None:
    cases = [case for case in slowly.CASES.splitlines() if case]
    for file, _, name in (case.partition("::") for case in cases):
        assert name.split("[")[0] in _tests_in(ROOT / "tests" / file), f"{file}::{name}"


def test_the_errors_are_many_and_each_is_another() -> None:
    assert len(MUTANTS) >= 50
    keys = Counter((error.place, error.old, error.new, error.which) for error in MUTANTS)
    assert not [key for key, count in keys.items() if count > 1]
    assert not [what for what, count in Counter(error.what for error in MUTANTS).items() if count > 1]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("- what: lost\n  in: sums.py::add\n  from: a\n  tests: test_sums.py", "lacks ['to']"),
        ("- {what: w, in: sums.py, from: a, to: b, tests: t, test: u}", "unknown ['test']"),
        ("- {what: w, in: sums.py, from: [a], to: b, tests: t}", "not text"),
        ("- {what: w, in: sums.py, from: a, to: b, tests: t, hangs: maybe}", "hangs"),
        ("what: w", "must be a list"),
        ("- w", "must have the fields"),
    ],
)
def test_a_table_that_is_misspelt_says_so(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "sums.yaml"
    path.write_text(entry)
    with pytest.raises(ValueError, match=r"sums\.yaml") as raised:
        list(tables.read(path))
    assert said in str(raised.value)


def test_values_of_a_table_are_text(tmp_path: Path) -> None:
    path = tmp_path / "sums.yaml"
    path.write_text("- {what: w, in: 'sums.py::add', from: 0.10, to: true, tests: test_sums.py, which: 1 of 2}")
    (error,) = tables.read(path)
    assert (error.file, error.symbol, error.old, error.new) == ("sums.py", "add", "0.10", "true")
    assert (error.tests, error.which, error.hangs) == (("test_sums.py",), "1 of 2", False)


# Finding a piece of code and putting another in its place

SUMS = '''\
"""Sums."""

SCALE = {"one": 1, "two": 2}


def add(a, b):
    """The sum."""
    return scaled(a + b, "one")


def scaled(a, name):
    a = a * SCALE[name]  # a table
    if a < 0:
        log(a)
    return a


class Mean:
    start: float = 0.0

    def __call__(self, values):
        total = self.start
        for value in values:
            total = total + value
            log(
                "so far "
                f"{total + value}"
            )
        return total / len(values)
'''
ADDS = PlantedError("adds wrongly", "sums.py", "add", "a + b", "a - b", ("test_sums.py::test_add",))
CASES = {
    "expression": (ADDS, "scaled(a + b,", "scaled(a - b,"),
    "statement": (replace(ADDS, symbol="scaled", old="log(a)", new="pass"), "        log(a)", "        pass"),
    "statements": (
        replace(ADDS, symbol="scaled", old="if a < 0:\n    ...\nreturn a", new="return abs(a)"),
        "    if a < 0:\n        log(a)\n    return a",
        "    return abs(a)",
    ),
    "header": (replace(ADDS, symbol="scaled", old="if a < 0: ...", new="if a > 0: ..."), "a < 0", "a > 0"),
    "guard": (
        replace(ADDS, symbol="scaled", old="if a < 0: ...", new="..."),
        "    if a < 0:\n        log(a)",
        "    log(a)",
    ),
    "constant": (replace(ADDS, symbol="SCALE", old="2", new="-2"), '"two": 2', '"two": -2'),
    "field": (replace(ADDS, symbol="Mean.start", old="0.0", new="1.0"), "= 0.0", "= 1.0"),
    "brackets": (
        replace(ADDS, symbol="Mean.__call__", old="total", new="total or 1", which="5 of 5"),
        "total / len",
        "(total or 1) / len",
    ),
    "f-string": (
        replace(ADDS, symbol="Mean.__call__", old="total + value", new="total", which="2 of 2"),
        'f"{total + value}"',
        'f"{total}"',
    ),
    "second": (
        replace(ADDS, symbol="Mean.__call__", old="total + value", new="value", which="1 of 2"),
        "total = total + value",
        "total = value",
    ),
}


def _tree(root: Path, **files: str) -> Path:
    for name, source in files.items():
        path = root / PACKAGE / (name.replace("_in_", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize("name", CASES)
def test_only_what_the_pattern_fits_is_replaced(tmp_path: Path, name: str) -> None:
    error, old, new = CASES[name]
    assert SUMS.count(old) == 1
    _, planted = error.planted(_tree(tmp_path, sums=SUMS))
    wanted = SUMS.replace(old, new)
    assert pattern.same(ast.parse(planted), ast.parse(wanted))
    if name != "f-string":  # before Python 3.12 what stands in one has no place of its own
        assert planted == wanted
    assert error.fault(tmp_path) is None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["formatted", "moved", "surrounded"])
def test_an_error_still_fits_after_the_code_was(tmp_path: Path, name: str, way: str) -> None:
    """The same error in the same program, however it is written, wherever it stands, whatever is added."""
    error, old, new = CASES[name]
    before, after = SUMS, SUMS.replace(old, new)
    if way == "surrounded":
        added = "def first(a, b):\n    if a < 0:\n        log(a)\n    return a + b\n\n\n{}\n\nLAST = [0.0, 2]\n"
        before, after = added.format(before), added.format(after)
    elif way == "formatted":  # no comments, other quotes, other lines
        before = ast.unparse(ast.parse(before)).replace("a + b", "(\n        a\n        # and\n        + b\n    )")
    root = _tree(
        tmp_path, other="def minus(a, b):\n    return a + b\n", **{"er_in_deep" if way == "moved" else "sums": before}
    )
    place, planted = error.planted(root)
    assert place == Path(PACKAGE, "er/deep.py" if way == "moved" else "sums.py")
    assert pattern.same(ast.parse(planted), ast.parse(after))


def test_listed_errors_do_not_depend_on_how_the_source_is_written(tmp_path: Path) -> None:
    """Some of the tables' own, in files whose comments, quotes and line breaks are gone."""
    ours = [error for error in MUTANTS if error.file.endswith(".py")]
    for error in ours[:: max(1, len(ours) // 20)]:
        place, planted = error.planted(ROOT)
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(ast.unparse(ast.parse((ROOT / place).read_text(encoding="utf-8"))))
        again, plain = error.planted(tmp_path)
        assert again == place
        assert pattern.same(ast.parse(plain), ast.parse(planted)), error.what


MISFITS = {
    "a pattern that is gone": ({"old": "a * b"}, "0 times instead of once"),
    "a pattern that stands elsewhere": ({"old": "a * SCALE[name]"}, "it stands in sums.py::scaled"),
    "a symbol that is gone": ({"symbol": "sum"}, "in no file (it stands in sums.py::add)"),
    "a symbol of several files": ({"file": "gone.py", "symbol": "log", "old": "text"}, "but in left.py, right.py"),
    "a pattern that fits twice": ({"symbol": "Mean.__call__", "old": "total + value"}, "2 times instead of once"),
    "another number of places": ({"which": "1 of 2"}, "1 times instead of 2"),
    "a change that is none": ({"new": "(a) + b"}, "nothing would change"),
    "what is not Python": ({"new": "a +"}, "not Python"),
    "statements in an expression": ({"new": "return a"}, "statements in the place of an expression"),
    "text that is gone": ({"file": "page.js", "old": "b", "new": "c"}, "0 times instead of once"),
    "text that stands there twice": ({"file": "page.js", "old": "a", "new": "c"}, "2 times instead of once"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_error_that_does_not_fit_says_so(tmp_path: Path, name: str) -> None:
    log = "def log(text):\n    print(text)\n"
    root = _tree(tmp_path, sums=SUMS, left=log, right=log)
    (root / PACKAGE / "page.js").write_text("a = a;")
    changes, said = MISFITS[name]
    assert said in str(replace(ADDS, **changes).fault(root))


def test_files_that_are_not_python_are_changed_by_their_text(tmp_path: Path) -> None:
    root = _tree(tmp_path, sums=SUMS)
    (root / PACKAGE / "page.js").write_text("let a = 1; // a < b")
    error = replace(ADDS, file="page.js", symbol="", old="a < b", new="a > b")
    assert error.planted(root) == (Path(PACKAGE, "page.js"), "let a = 1; // a > b")


# Generated errors


def test_a_rule_changes_one_thing_at_a_time() -> None:
    source = textwrap.dedent("""
        def f(a: int = 1, *, on: bool = True):
            '''No 5.'''
            if not a <= 2.0 or on:
                raise ValueError(f"{a + 3} is wrong" + str(a - 4))
            check(a)
            return g(max(a, 0), -a ** 2).clamp(min=0.0)
    """)
    made = [(error.old, error.new) for error in generate.of_source("f.py", source, ())]
    assert sorted(made) == sorted(
        [
            ("1", "2"),
            ("True", "False"),
            ("not a <= 2.0 or on", "not a <= 2.0 and on"),
            ("not a <= 2.0", "a <= 2.0"),
            ("a <= 2.0", "a < 2.0"),
            ("2.0", "4.0"),
            ("check(a)", "pass"),
            ("g(max(a, 0), -a ** 2).clamp(min=0.0)", "g(max(a, 0), -a ** 2)"),
            ("g(max(a, 0), -a ** 2).clamp(min=0.0)", "g(max(a, 0), -a ** 2).clamp(max=0.0)"),
            ("g(max(a, 0), -a ** 2)", "g(-a ** 2, max(a, 0))"),
            ("max(a, 0)", "min(a, 0)"),
            ("0", "1"),
            ("-a ** 2", "a ** 2"),
            ("a ** 2", "a * 2"),
            ("2", "3"),
            ("0.0", "1.0"),
        ]
    )


def test_generated_errors_can_be_planted_and_what_is_none_is_still_made() -> None:
    plan = generate.read()
    every = list(generate.everything(ROOT, plan))
    assert len({(error.place, error.old, error.new, error.which) for error in every}) == len(every) > 500
    assert not [fault for error in every[::5] if (fault := error.fault(ROOT))]
    stale = [one for one in plan.equivalent if not any(one.fits(error) for error in every)]
    assert not stale, "\n".join(
        ["tests/mutants/generated.yaml lists what is not generated any more:", *map(str, stale)]
    )


def test_what_is_equivalent_is_not_planted_wherever_it_stands(tmp_path: Path) -> None:
    plan = generate.Plan(("*.py",), ("test_sums.py",), ())
    every = generate.generated(_tree(tmp_path, moved=SUMS), plan)
    none = generate.Equivalent("sums.py", "add", "(a  +  b)", "a-b", "", "for the sake of the test")
    left = generate.generated(tmp_path, replace(plan, equivalent=(none,)))
    assert [error.place for error in every if error not in left] == ["moved.py::add"]


# The tool

WORLD = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
TESTS = """from sage_grpo.sums import add, double


def test_add():
    assert add(1, 2) == 3


def test_double():
    assert double(0) == 0
"""
SURVIVES = PlantedError("does not double", "sums.py", "double", "2 * a", "a", ("test_sums.py::test_double",))
SLEEPS = replace(ADDS, what="sleeps", old="a + b", new="__import__('time').sleep(600)")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A package of a few lines, with tests of which one says little."""
    root = _tree(tmp_path, __init__='"""A package."""\n', sums=WORLD)
    (root / "tests").mkdir()
    (root / "tests" / "test_sums.py").write_text(TESTS)
    return root


def _planted(world: Path, capsys: pytest.CaptureFixture[str], *errors: PlantedError) -> tuple[int, str]:
    code = plant.main([], errors, world)
    return code, capsys.readouterr().out


def test_survivors_are_named_and_fail_the_command(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _planted(world, capsys, ADDS, SURVIVES)
    assert code == 1, said
    assert "2 errors planted, 1 not noticed" in said
    assert said.splitlines()[-1].startswith("SURVIVED")
    assert "does not double" in said.splitlines()[-1]
    assert "[test_sums.py::test_add]" in said
    assert (world / PACKAGE / "sums.py").read_text() == WORLD  # planted in a copy


def test_errors_that_are_all_noticed_are_a_success(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the first of its tests passes."""
    later = replace(ADDS, tests=("test_sums.py::test_double", "test_sums.py"))
    assert _planted(world, capsys, later)[0] == 0


def test_a_tree_whose_tests_fail_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / PACKAGE / "sums.py").write_text(WORLD.replace("return 2 * a", "return 2 * a + 1"))
    code, said = _planted(world, capsys, ADDS, SURVIVES)
    assert code == 2, said
    assert "do not pass on the tree as it is" in said
    assert "test_double" in said


def test_a_test_that_is_not_there_notices_nothing(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _planted(world, capsys, replace(ADDS, tests=("test_sums.py::test_gone",)))
    assert code == 2, said
    assert "do not pass on the tree as it is" in said


def test_tables_that_do_not_fit_are_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _planted(world, capsys, ADDS, replace(SURVIVES, old="3 * a"))
    assert code == 2, said
    assert "do not fit the source any more" in said
    assert "double" in said


def test_an_error_that_hangs_is_noticed_only_where_that_is_stated(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plant, "LIMIT", 1.0)
    code, said = _planted(world, capsys, SLEEPS, replace(SLEEPS, what="sleeps, as it must", hangs=True))
    assert code == 1, said
    assert "2 errors planted, 1 not noticed" in said
    assert said.splitlines()[-1].startswith("TIMED OUT")
    assert "sleeps, as it must" not in said.splitlines()[-1]


@pytest.mark.slow
def test_errors_within_functions_are_tried_side_by_side_and_again_where_no_test_fails(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was made on import is of the code as it was, so an error that shows there needs a package that is imported anew."""
    with (world / PACKAGE / "sums.py").open("a") as stream:
        stream.write("\n\nMADE = double(1)\n")
    (world / "tests" / "test_made.py").write_text(
        "from sage_grpo.sums import MADE\n\n\ndef test_made():\n    assert MADE == 2\n"
    )
    tried = [replace(ADDS, cpu_limit=60), replace(SURVIVES, cpu_limit=60)]
    made = replace(SURVIVES, what="doubles wrongly", tests=("test_made.py",), cpu_limit=60)
    code, said = _planted(world, capsys, *tried, made)
    assert code == 1, said
    assert "3 errors planted, 1 not noticed" in said
    assert "does not double" in said.splitlines()[-1]
    lines = said.splitlines()
    assert "adds wrongly" in lines[1]  # before those that take longer
    assert [line.split()[1] for line in lines if "doubles wrongly" in line] == ["noticed"]


KINDS = """
import functools


def wrapped(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@wrapped
@functools.cache
def plain(a=1):
    return a + 1


class Kind:
    @property
    def read(self):
        return 1 + 1

    @staticmethod
    def still():
        return 1 + 1

    @classmethod
    def made(cls):
        return 1 + 1

    def method(self):
        return 1 + 1
"""


@pytest.mark.parametrize("symbol", ["plain", "Kind.read", "Kind.still", "Kind.made", "Kind.method"])
def test_a_loaded_function_gets_other_code_whatever_is_around_it(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sage_grpo.kinds")
    exec(compile(KINDS, "kinds.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = module.Kind()  # was there before
    swap.swap("kinds.py", symbol, KINDS.replace("1 + 1", "1 - 1").replace("a + 1", "a - 1"))
    now = {
        "plain": module.plain(),
        "Kind.read": known.read,
        "Kind.still": known.still(),
        "Kind.made": module.Kind.made(),
        "Kind.method": known.method(),
    }
    assert now == {name: 0 if name == symbol else 2 for name in now}


def test_only_what_a_function_does_is_swapped(tmp_path: Path) -> None:
    root = _tree(tmp_path, kinds=KINDS)
    inside = replace(ADDS, file="kinds.py", symbol="Kind.method", old="1 + 1", new="2")
    assert swap.can_be_swapped(inside, root)
    assert not swap.can_be_swapped(replace(inside, symbol="plain", old="1", new="2", which="1 of 2"), root)  # a default
    assert swap.can_be_swapped(replace(inside, symbol="plain", old="1", new="2", which="2 of 2"), root)
    assert not swap.can_be_swapped(replace(inside, symbol="plain", old="functools.cache", new="wrapped"), root)
    assert not swap.can_be_swapped(replace(inside, symbol="Kind", which="4 of 4"), root)


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [True, False])
def test_an_error_that_computes_for_ever_is_stopped_by_its_own_limit(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, side_by_side: bool
) -> None:
    monkeypatch.setattr(plant, "can_be_swapped", lambda *_: side_by_side)
    monkeypatch.setattr(swap, "SECONDS", 0.5)
    runs = replace(ADDS, old="return a + b", new="while True: pass", hangs=True, cpu_limit=1)
    code, said = _planted(world, capsys, runs)
    assert code == 0, said
    assert ("[a test that does not end]" if side_by_side else "TIMED OUT") in said
