"""Planted errors fit the source, also after it was moved about, and the tool that plants them tells noticed errors from survivors.

The errors themselves are planted by `make mutants`, not here.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mutants import error, generate, plant
from mutants.error import PACKAGE, PlantedError

ROOT = Path(__file__).resolve().parent.parent


@cache
def _tests_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_listed_error_can_be_planted_and_names_tests_that_exist() -> None:
    problems = []
    for one in sorted(error.listed(), key=lambda one: one.file):
        problems += [fault] if (fault := one.fault(ROOT)) else []
        for test in one.tests:
            file, _, name = test.partition("::")
            known = _tests_in(ROOT / "tests" / file)
            if not known or (name and name.split("[")[0] not in known):
                problems.append(f"{one.what}: there is no tests/{test}")
    assert not problems, "\n".join(["Bring the tables in tests/mutants up to date:", *problems])


SUMS = '''\
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
            log(f"so far {total + value}")
        return total / len(values)
'''
ADDS = PlantedError("adds wrongly", "sums.py", "add", "(a  +  b)", "a - b", ("test_sums.py::test_add",))
IN_MEAN = replace(ADDS, symbol="Mean.__call__", old="total + value", new="total")
CASES = [
    (ADDS, "scaled(a + b,", "scaled(a - b,"),
    (replace(ADDS, symbol="scaled", old="log(a)", new="pass"), "        log(a)", "        pass"),
    (replace(ADDS, symbol="SCALE", old="2", new="-2"), '"two": 2', '"two": -2'),
    (replace(ADDS, symbol="Mean.start", old="0.0", new="1.0"), "= 0.0", "= 1.0"),
    (replace(IN_MEAN, which="2 of 2"), "{total + value}", "{total}"),
    (replace(IN_MEAN, old="total", new="total or 1", which="5 of 5"), "total / len", "(total or 1) / len"),
]


def _tree(root: Path, **files: str) -> Path:
    for name, source in files.items():
        path = root / PACKAGE / (name.replace("_in_", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(("one", "old", "new"), CASES)
def test_an_error_fits_also_after_the_code_was_moved_or_surrounded(
    tmp_path: Path, one: PlantedError, old: str, new: str
) -> None:
    added = "def first(a, b):\n    if a < 0:\n        log(a)\n    return a + b\n\n\n{}\n\nLAST = [0.0, 2]\n"
    after = SUMS.replace(old, new)
    assert after != SUMS
    for number, (name, around) in enumerate([("sums", "{}"), ("er_in_deep", "{}"), ("sums", added)]):
        before = SUMS if around == "{}" else added.replace("{}", SUMS)
        wanted = after if around == "{}" else added.replace("{}", after)
        root = _tree(tmp_path / str(number), other="def minus(a, b):\n    return a + b\n", **{name: before})
        place, planted = one.planted(root)
        assert place == Path(PACKAGE, name.replace("_in_", "/") + ".py")
        assert ast.dump(ast.parse(planted)) == ast.dump(ast.parse(wanted))


def test_an_error_that_does_not_fit_says_so(tmp_path: Path) -> None:
    root = _tree(tmp_path, sums=SUMS)
    for changes, said in (
        ({"old": "a * b"}, "0 times instead of once"),
        ({"symbol": "sum"}, "is gone"),
        ({"symbol": "Mean.__call__", "old": "total + value"}, "2 times instead of once"),
        ({"new": "(a) + b"}, "nothing would change"),
        ({"new": "a +"}, "invalid syntax"),
    ):
        assert said in str(replace(ADDS, **changes).fault(root))  # type: ignore[arg-type]


def test_a_rule_changes_one_thing_at_a_time() -> None:
    source = textwrap.dedent("""
        def f(a: int = 1, *, on: bool = True):
            '''No 5.'''
            if not a <= 2.0 or on:
                raise ValueError(f"{a + 3} is wrong" + str(a - 4))
            check(a)
            return g(max(a, 0), -a ** 2).clamp(min=0.0)
    """)
    made = [change.error(Path()) for change in generate.changes_of(source, Path("f.py"))]
    called = "g(max(a, 0), -a ** 2).clamp(min=0.0)"
    wanted = [
        ("1", "2"), ("True", "False"), ("not a <= 2.0 or on", "not a <= 2.0 and on"), ("not a <= 2.0", "a <= 2.0"),
        ("a <= 2.0", "a < 2.0"), ("2.0", "4.0"), ("check(a)", "pass"), (called, "g(max(a, 0), -a ** 2)"),
        (called, "g(max(a, 0), -a ** 2).clamp(max=0.0)"), ("g(max(a, 0), -a ** 2)", "g(-a ** 2, max(a, 0))"),
        ("max(a, 0)", "min(a, 0)"), ("0", "1"), ("-a ** 2", "a ** 2"), ("a ** 2", "a * 2"), ("2", "3"), ("0.0", "1.0"),
    ]  # fmt: skip
    assert sorted((one.old, one.new) for one in made) == sorted(wanted)


@pytest.mark.slow
def test_drawn_errors_can_be_planted_and_what_is_none_is_still_made(tmp_path: Path) -> None:
    some = generate.drawn(ROOT, 5, 8, "sampl")
    assert {generate.room(one.file) for one in some} == {"samplers"}
    assert len(some) == 8
    assert not [fault for one in some if (fault := one.fault(ROOT))]
    assert generate.drawn(ROOT, 6, 8, "samplers") != generate.drawn(ROOT, 5, 8, "samplers") == some
    package, stale = ROOT / PACKAGE, []
    for none in sorted(generate.read(), key=lambda none: none.file):
        changes = generate.changes_of((package / none.file).read_text(encoding="utf-8"), package / none.file)
        made = (change.error(package) for change in changes if change.symbol == none.symbol)
        stale += [] if any(none.fits(one) for one in made) else [str(none)]
    assert not stale, "\n".join(["tests/mutants/generated.yaml lists what is not generated any more:", *stale])
    root = _tree(tmp_path, moved=SUMS)
    every = generate.drawn(root, 1, 1000, equivalent=())
    none = generate.Equivalent("sums.py", "add", "(a  +  b)", "a-b", "", "wherever it stands")
    left = generate.drawn(root, 1, 1000, equivalent=(none,))
    assert [one.place for one in every if one not in left] == ["moved.py::add"]


WORLD = """
def add(a, b):
    return a + b


def double(a):
    return 2 * a


def unused(a):
    return -a


MADE = int(7)
"""
TESTS = """
from sage_grpo.sums import MADE, add, double


def test_add():
    assert add(1, 2) == 3


def test_double():
    assert double(0) == 0


def test_made():
    assert MADE == 7
"""
SURVIVES = PlantedError("does not double", "sums.py", "double", "2 * a", "a", ("test_sums.py",))
SLEEPS = replace(ADDS, what="sleeps", new="__import__('time').sleep(600)")

SAID = """\
2 copies are ready ().
The tree as it is passes ().
  1/4 noticed  sums.py::add: adds wrongly  [test_sums.py::test_add]
  2/4 SURVIVED  sums.py::double: does not double  [test_sums.py]
  3/4 TIMED OUT  sums.py::add: sleeps  [test_sums.py::test_add]
  4/4 TIMED OUT  sums.py::add: sleeps as it must  [test_sums.py::test_add]
Drawn by --seed 1 --draw 9:
3 tests measured ().
  1/5 SURVIVED  sums.py::unused: generated: -a -> a  [no test runs it]
  2/5 noticed  sums.py::add: generated: a + b -> a - b  [test_sums.py::test_add]
  3/5 SURVIVED  sums.py::double: generated: 2 -> 3  [test_sums.py::test_double]
  4/5 noticed  sums.py::double: generated: 2 * a -> 2 / a  [test_sums.py::test_double]
  5/5 noticed  sums.py::MADE: generated: 7 -> 8  [test_sums.py::test_made]"""


@pytest.mark.slow
def test_survivors_are_named_and_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plant, "import_libraries", lambda root: None)  # it needs none
    monkeypatch.setattr(plant, "LIMIT", 8.0)
    root = _tree(tmp_path, __init__='"""A package."""\n', sums=WORLD)
    (root / "tests").mkdir()
    (root / "tests" / "test_sums.py").write_text(TESTS)
    hangs = replace(SLEEPS, what="sleeps as it must", hangs=True)
    reach, answers = tmp_path / "reach.json", tmp_path / "answers.jsonl"
    options = ["--draw", "9", "--seed", "1", "--reach", str(reach), "--json", str(answers)]
    code = plant.main(options, [ADDS, SURVIVES, SLEEPS, hangs], root)
    said = capsys.readouterr().out
    assert code == 1, said
    assert _lines(said.partition("\n(first level)")[0]) == _lines(SAID)
    assert "(first level): 3 of 5 drawn errors noticed (60%)" in said
    assert "9 errors planted, 4 not noticed" in said
    assert (root / PACKAGE / "sums.py").read_text() == WORLD  # planted in a copy
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sum(not record["noticed"] for record in records) == 4
    (added,) = (record for record in records if record["error"] == "generated: a + b -> a - b")
    assert (added["room"], added["test"]) == ("(first level)", "test_sums.py::test_add")
    # What was kept is read again, and of a changed file every line counts as run by all its tests; after the limit nothing is tried.
    (root / PACKAGE / "sums.py").write_text(f"# moved\n{WORLD}")
    kept = ["--unlisted", *options]
    assert plant.main(kept, root=root) == 1
    assert "SURVIVED" in (said := capsys.readouterr().out)
    assert "(first level): 4 of 5 drawn errors noticed" not in said
    assert plant.main([*kept, "--limit-seconds", "0"], root=root) == 0
    assert "0 errors planted, 0 not noticed, 5 not tried within --limit-seconds 0" in capsys.readouterr().out
    code = plant.main([], [replace(ADDS, tests=("test_sums.py::test_gone",))], root)
    assert code == 2
    assert "do not pass on the tree as it is" in capsys.readouterr().out


def _lines(said: str) -> list[str]:
    """Lines without their seconds and numbers, in no order: which of two tries ends first is the machine's."""
    lines = (line for line in said.splitlines() if " parts, " not in line)
    return sorted(re.sub(r" *\d+(\.\d+)? s\b|^ *\d+/", "", line) for line in lines)
