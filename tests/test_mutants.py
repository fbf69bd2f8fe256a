"""Planted errors fit the source, also after it was moved about, and the tool that plants them tells noticed errors from survivors.

The errors themselves are planted by `make mutants`, not here.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("- what: lost\n  in: sums.py::add\n  from: a\n  tests: test_sums.py", "lacks ['to']"),
        ("- {what: w, in: sums.py, from: [a], to: b, tests: t}", "not text"),
    ],
)
def test_a_table_that_is_misspelt_says_so(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "sums.yaml"
    path.write_text(entry)
    with pytest.raises(ValueError, match=r"sums\.yaml") as raised:
        list(tables.read(path))
    assert said in str(raised.value)


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
@pytest.mark.parametrize("way", ["as it was", "formatted", "moved", "surrounded"])
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


MISFITS = {
    "a pattern that is gone": ({"old": "a * b"}, "0 times instead of once"),
    "a symbol that is gone": ({"symbol": "sum"}, "in no file (it stands in sums.py::add)"),
    "a pattern that fits twice": ({"symbol": "Mean.__call__", "old": "total + value"}, "2 times instead of once"),
    "a change that is none": ({"new": "(a) + b"}, "nothing would change"),
    "what is not Python": ({"new": "a +"}, "not Python"),
    "text that is gone": ({"file": "page.js", "old": "b", "new": "c"}, "0 times instead of once"),
}


def test_an_error_that_does_not_fit_says_so(tmp_path: Path) -> None:
    root = _tree(tmp_path, sums=SUMS)
    (root / PACKAGE / "page.js").write_text("a = a;")
    for changes, said in MISFITS.values():
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
    changes = generate.changes_of(source, Path("f.py"))
    made = [(error.old, error.new) for error in (change.error(Path()) for change in changes)]
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


def test_drawn_errors_can_be_planted_and_what_is_none_is_still_made() -> None:
    some = generate.drawn(ROOT, 5, 8, "fl")
    assert {generate.room(error.file) for error in some} == {"flow"}
    assert len(some) == 8
    assert not [fault for error in some if (fault := error.fault(ROOT))]
    assert generate.drawn(ROOT, 6, 8, "flow") != generate.drawn(ROOT, 5, 8, "flow") == some
    none = generate.read()
    files = {one.file for one in none}
    every = [
        change.error(ROOT / PACKAGE)
        for file in files
        for change in generate.changes_of((ROOT / PACKAGE / file).read_text(encoding="utf-8"), ROOT / PACKAGE / file)
        if any(one.symbol.split(".")[-1] in change.source for one in none)
    ]
    stale = [one for one in none if not any(one.fits(error) for error in every)]
    assert not stale, "\n".join(
        ["tests/mutants/generated.yaml lists what is not generated any more:", *map(str, stale)]
    )


def test_what_is_equivalent_is_not_drawn_wherever_it_stands(tmp_path: Path) -> None:
    root = _tree(tmp_path, moved=SUMS)
    every = generate.drawn(root, 1, 1000, equivalent=())
    none = generate.Equivalent("sums.py", "add", "(a  +  b)", "a-b", "", "for the sake of the test")
    left = generate.drawn(root, 1, 1000, equivalent=(none,))
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
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a few lines, with tests of which one says little."""
    monkeypatch.setattr(plant, "import_libraries", lambda root: None)  # it needs none
    root = _tree(tmp_path, __init__='"""A package."""\n', sums=WORLD)
    (root / "tests").mkdir()
    (root / "tests" / "test_sums.py").write_text(TESTS)
    return root


def _planted(world: Path, capsys: pytest.CaptureFixture[str], *errors: PlantedError) -> tuple[int, str]:
    code = plant.main([], errors, world)
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_survivors_are_named_and_fail_the_command(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _planted(world, capsys, ADDS, SURVIVES)
    assert code == 1, said
    assert "2 errors planted, 1 not noticed" in said
    assert said.splitlines()[-1].startswith("SURVIVED")
    assert "does not double" in said.splitlines()[-1]
    assert "[test_sums.py::test_add]" in said
    assert (world / PACKAGE / "sums.py").read_text() == WORLD  # planted in a copy


@pytest.mark.slow
def test_a_test_that_is_not_there_notices_nothing(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _planted(world, capsys, replace(ADDS, tests=("test_sums.py::test_gone",)))
    assert code == 2, said
    assert "do not pass on the tree as it is" in said


@pytest.mark.slow
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
def test_a_drawn_error_is_tried_by_the_tests_that_run_its_line(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is made on import needs a package that is imported anew, and what no test runs is not noticed."""
    sums = world / PACKAGE / "sums.py"
    sums.write_text(f"{WORLD}\n\ndef unused(a):\n    return -a\n\n\nMADE = 7\n")
    tests = TESTS.replace("add, double", "MADE, add, double")
    (world / "tests" / "test_sums.py").write_text(f"{tests}\n\ndef test_made():\n    assert MADE == 7\n")
    code = plant.main(["--unlisted", "--draw", "9", "--seed", "1"], (), world)
    said = capsys.readouterr().out
    assert code == 1, said
    became = {line.split(": generated: ")[1].split("  [")[0]: line for line in said.splitlines() if "/5 " in line}
    assert {what: line.split()[1] for what, line in became.items()} == {
        "a + b -> a - b": "noticed",
        "2 -> 3": "SURVIVED",  # 2 * 0
        "2 * a -> 2 / a": "noticed",  # 2 / 0
        "-a -> a": "SURVIVED",
        "7 -> 8": "noticed",
    }
    assert "[test_sums.py::test_add]" in became["a + b -> a - b"]
    assert "[no test runs it]" in became["-a -> a"]
    assert "(first level): 3 of 5 drawn errors noticed (60%)" in said
    assert "--seed 1 --draw 9" in said


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
