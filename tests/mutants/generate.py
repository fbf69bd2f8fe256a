"""Errors that a rule can make: every comparison, operation, number, flag, function with a twin and pair of arguments of the package, changed once.

`generated.yaml` lists the changed programs that are no errors, each with its reason. reach.py finds the tests. mutmut (3.8) and cosmic-ray (8.7)
start the tests anew for every error; of a library this needs the rules only.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mutants.error import PACKAGE, PlantedError, meaning, places

FILE = Path(__file__).with_name("generated.yaml")
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = "min max, minimum maximum, amin amax, any all, mean sum, zeros_like ones_like, sin cos, ceil floor, log1p log, expm1 exp, var std"
TWINS = {name: twin for pair in PAIRS.split(", ") for name, twin in (pair.split(), reversed(pair.split()))}
SYMMETRIC = ("isinstance", "getattr", "min", "max", "minimum", "maximum", "equal", "allclose", "transpose")
"""Calls whose arguments are not swapped: they may be, or the first is of another kind."""
IDENTITIES = ("detach", "abs", "sqrt", "square", "exp", "sorted", "clamp", "cumsum", "round", "floor", "ceil")
"""Functions and methods whose argument is of the same kind as their answer."""


@dataclass(frozen=True)
class Equivalent:
    file: str
    symbol: str
    old: str
    new: str
    which: str
    """Which of several places; empty: all of them."""
    why: str

    def fits(self, error: PlantedError) -> bool:
        """True for that error; where the symbol stands does not matter, nor how the code is written."""
        if self.symbol != error.symbol or self.which not in ("", error.which):
            return False
        return meaning(self.old) == meaning(error.old) and meaning(self.new) == meaning(error.new)


def read(path: Path = FILE) -> tuple[Equivalent, ...]:
    equivalent = []
    for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)):
        if set(entry) - {"which"} != {"in", "from", "to", "why"} or not entry["why"]:
            raise ValueError(f"{path.name}: {entry} must have in, from, to and why, and may have which.")
        file, _, symbol = entry["in"].partition("::")
        equivalent.append(Equivalent(file, symbol, entry["from"], entry["to"], entry.get("which", ""), entry["why"]))
    return tuple(equivalent)


def room(file: str) -> str:
    """The folder of a file of the package; the modules of its first level are one room."""
    return file.rpartition("/")[0].partition("/")[0] or "(first level)"


def drawn(
    root: Path, seed: int, count: int, rooms: str = "", equivalent: Sequence[Equivalent] | None = None
) -> list[PlantedError]:
    """Up to `count` errors of every room whose name holds `rooms`, drawn by the seed, without those that are none.

    A room's draw does not depend on the other rooms.
    """
    none = read() if equivalent is None else equivalent
    files: dict[str, list[Path]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        files.setdefault(room(path.relative_to(root / PACKAGE).as_posix()), []).append(path)
    chosen = []
    for name, paths in files.items():
        if rooms in name:
            changes = [change for path in paths for change in changes_of(path.read_text(encoding="utf-8"), path)]
            random.Random(f"{seed} {name}").shuffle(changes)
            errors = (change.error(root / PACKAGE) for change in changes)
            chosen += itertools.islice((one for one in errors if not any(no.fits(one) for no in none)), count)
    return chosen


@dataclass(frozen=True)
class Change:
    path: Path
    source: str
    number: int
    """Of the node's place."""
    symbol: str
    node: ast.AST
    new: ast.AST

    def error(self, root: Path) -> PlantedError:
        """The error that it is; `root` is the package's folder."""
        old, new = ast.unparse(self.node), ast.unparse(ast.fix_missing_locations(self.new))
        what, file = f"generated: {old} -> {new}", self.path.relative_to(root).as_posix()
        error = PlantedError(what, file, self.symbol, old, new, hangs=True, drawn=True)
        found = error.matches(self.source)
        which = f"{found.index(self.number) + 1} of {len(found)}" if len(found) > 1 else ""
        return replace(error, what=f"{what} ({which})" if which else what, which=which)


def changes_of(source: str, path: Path) -> list[Change]:
    """All changes of one file: of nodes that are computed with, not of annotations, decorators, texts, what an exception or a warning says,
    nor the defaults of a configuration and a module's named thresholds and times, which are choices."""
    made, skipped = [], set()
    for number, place in enumerate(places(source)):
        said = place.field in ("annotation", "returns", "decorator_list", "bases") or _is_said(place.node, place.above)
        if said or place.above in skipped:
            skipped.add(place.node)
            continue
        symbol = place.symbols[-1] if place.symbols else ""
        made += [Change(path, source, number, symbol, place.node, new) for new in changed(place.node)]
    return made


def _is_said(node: ast.AST, above: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        kind = ast.unparse(node.annotation)
        return kind == "TypeAlias" or (isinstance(above, ast.ClassDef) and not kind.startswith("ClassVar"))
    if isinstance(node, ast.Assign) and isinstance(above, ast.Module):
        return ast.unparse(node.targets[0]).isupper() and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("warnings.warn", "TypeVar")
    return isinstance(node, ast.Raise | ast.JoinedStr)


def changed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    for kind, rule in RULES:
        if isinstance(node, kind):
            yield from rule(node)


def _with(node: ast.AST, **fields: object) -> ast.expr:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    assert isinstance(new, ast.expr)
    return new


def _comparison(node: ast.Compare) -> Iterator[ast.expr]:
    for number, operator in enumerate(node.ops):
        yield _with(node, ops=[*node.ops[:number], COMPARED[type(operator)](), *node.ops[number + 1 :]])


def _operation(node: ast.BinOp) -> Iterator[ast.expr]:
    if type(node.op) in COUNTED:
        yield _with(node, op=COUNTED[type(node.op)]())


def _either(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _sign(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand


def _number(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node.value, float) and not 0 < node.value < 1e-5:  # twice a tolerance is another one
        yield ast.Constant(node.value * 2.0 if node.value else 1.0)


def _condition(node: ast.IfExp) -> Iterator[ast.expr]:
    yield _with(node, body=node.orelse, orelse=node.body)


def _call(node: ast.Call) -> Iterator[ast.expr]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in TWINS:
        twin = _with(node.func, **{"attr" if isinstance(node.func, ast.Attribute) else "id": TWINS[name]})
        yield _with(node, func=twin)
    if name in IDENTITIES:
        library = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("torch", "math", "np")
        if isinstance(node.func, ast.Attribute) and not library:
            yield node.func.value
        elif node.args:
            yield node.args[0]
    swapped = {"min": "max", "max": "min"}
    for number, word in enumerate(node.keywords):
        if name == "clamp" and len(node.keywords) == 1 and word.arg in swapped:
            other = ast.keyword(swapped[word.arg], word.value)
            yield _with(node, keywords=[*node.keywords[:number], other, *node.keywords[number + 1 :]])
    for number, (one, other) in enumerate(itertools.pairwise(node.args)):
        kinds = name not in SYMMETRIC and not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred)
        if kinds and ast.dump(one) != ast.dump(other):
            yield _with(node, args=[*node.args[:number], other, one, *node.args[number + 2 :]])


def _lost(node: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


RULES: tuple[tuple[type[ast.AST], Callable[..., Iterator[ast.expr | ast.stmt]]], ...] = (
    (ast.Compare, _comparison),
    (ast.BinOp, _operation),
    (ast.BoolOp, _either),
    (ast.UnaryOp, _sign),
    (ast.Constant, _number),
    (ast.IfExp, _condition),
    (ast.Call, _call),
    (ast.stmt, _lost),
)
