"""Planted errors: one change of a syntax tree each, and the tests that must see it. Tables in `errors/` list some:

    - what: the error in one line
      in: health/sentinel.py::Sentinel._before      # file under src/sage_grpo, and symbol
      from: Python that stands in that symbol once # an expression or statements, however they are formatted
      to: what stands there instead                # `pass` takes statements away
      tests: health/test_sentinel.py::test_name     # under tests/; or a list
      which: 2 of 3                                # only where it stands there several times
      hangs: true                                  # only where running into the time limit counts as noticed

Every value is text (`to: 1` needs no quotes); what YAML reads otherwise (`[`, `{`, `: `) goes into a block after `|-`.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

PACKAGE = "src/sage_grpo"
FIELDS = {"what", "in", "from", "to", "tests"}


class DoesNotFit(Exception):
    """An entry that names what is not there."""


@dataclass(slots=True)
class Place:
    """A node of a syntax tree, or the first of some statements of a block."""

    above: ast.AST
    field: str
    index: int | None
    symbols: tuple[str, ...]
    """Qualified names of what holds it, the innermost last."""
    line: int
    """First line of its statement."""
    inside: bool
    """It belongs to what a function does."""

    def nodes(self, count: int = 1) -> list[ast.AST]:
        value = getattr(self.above, self.field)
        return [value] if self.index is None else value[self.index : self.index + count]

    @property
    def node(self) -> ast.AST:
        return self.nodes()[0]

    def put(self, count: int, new: list[ast.AST]) -> None:
        if self.index is None:
            setattr(self.above, self.field, new[0])
        else:
            getattr(self.above, self.field)[self.index : self.index + count] = new


def walk(tree: ast.AST) -> list[Place]:
    """All nodes below one, each before those below it. Symbols are functions and classes, and what is assigned in the module or in a class."""
    found: list[Place] = []

    def look(node: ast.AST, symbols: tuple[str, ...], scope: str | None, line: int, inside: bool) -> None:
        for field, value in ast.iter_fields(node):
            within = inside or (field == "body" and isinstance(node, ast.FunctionDef))
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    own, deeper = symbols, scope
                    if scope is not None and (names := _defined(child)):
                        own = (*symbols, *(scope + name for name in names))
                        deeper = f"{own[-1]}." if isinstance(child, ast.ClassDef) else None
                    first = child.lineno if isinstance(child, ast.stmt) else line
                    found.append(Place(node, field, index, own, first, within))
                    look(child, own, deeper, first, within)

    look(tree, (), "", 1, False)
    return found


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@lru_cache(maxsize=8)
def places(source: str) -> list[Place]:
    """All nodes of a source; they are shared, and not to be changed."""
    return walk(ast.parse(source))


@lru_cache(maxsize=8)
def within(source: str) -> dict[str, list[int]]:
    """Symbol -> the numbers of its places; the empty one is the module."""
    found: dict[str, list[int]] = {"": []}
    for number, place in enumerate(places(source)):
        for symbol in {"", *place.symbols}:
            found.setdefault(symbol, []).append(number)
    return found


@lru_cache(maxsize=4096)
def code(text: str) -> tuple[ast.AST, ...] | ast.expr:
    """Python: an expression where it is one, else statements."""
    body = ast.parse(textwrap.dedent(text).strip("\n")).body
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else tuple(body)


def same(one: object, other: object) -> bool:
    """Two trees mean the same program; a name may be read in one and set in the other."""
    if type(one) is not type(other):
        return isinstance(one, ast.expr_context) and isinstance(other, ast.expr_context)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    if isinstance(one, ast.AST):
        return all(same(getattr(one, name, None), getattr(other, name, None)) for name in one._fields)
    return one == other


def meaning(text: str) -> str:
    found = code(text)
    return ast.dump(found) if isinstance(found, ast.AST) else "\n".join(map(ast.dump, found))


@dataclass(frozen=True)
class PlantedError:
    what: str
    """The error in one line."""
    file: str
    """File of its symbol when it was listed, under src/sage_grpo. A symbol that has moved is looked for in the whole package."""
    symbol: str
    """The function, method (`Class.method`) or assigned name that holds it; empty: the module."""
    old: str
    new: str
    tests: tuple[str, ...] = ()
    """Node ids under tests/."""
    hangs: bool = False
    """Running into a time limit counts as noticed."""
    which: str = ""
    """Its place if `old` fits several times: "2 of 3"."""
    drawn: bool = False
    """It is a generated one."""

    @property
    def place(self) -> str:
        return f"{self.file}::{self.symbol}" if self.symbol else self.file

    def fault(self, root: Path) -> str | None:
        try:
            self.located(root)
        except (DoesNotFit, SyntaxError) as error:
            return f"{self.what}: {error}"
        return None

    def planted(self, root: Path) -> tuple[Path, str]:
        path, source, number = self.located(root)
        tree, (old, new) = ast.parse(source), self.sides()
        walk(tree)[number].put(len(old), new)
        return path.relative_to(root), ast.unparse(tree)

    def located(self, root: Path) -> tuple[Path, str, int]:
        if meaning(self.old) == meaning(self.new):
            raise DoesNotFit(f"nothing would change in {self.place}")
        path = root / PACKAGE / self.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        if self.symbol not in within(source):
            every = ((path, path.read_text(encoding="utf-8")) for path in sorted((root / PACKAGE).rglob("*.py")))
            name = self.symbol.rpartition(".")[2]
            moved = [(path, text) for path, text in every if name in text and self.matches(text)]
            if len(moved) != 1:
                raise DoesNotFit(f"{self.place} is gone; it fits into {[path.name for path, _ in moved]}")
            ((path, source),) = moved
        found, (number, _, count) = self.matches(source), self.which.partition(" of ")
        if len(found) != int(count or 1):
            raise DoesNotFit(f"{self.place} holds it {len(found)} times instead of {count or 'once'}: {self.old}")
        return path, source, found[int(number or 1) - 1]

    def matches(self, source: str) -> list[int]:
        old, _ = self.sides()
        known = places(source)
        return [number for number in within(source).get(self.symbol, ()) if same(known[number].nodes(len(old)), old)]

    def sides(self) -> tuple[list[ast.AST], list[ast.AST]]:
        old, new = code(self.old), code(self.new)
        if isinstance(old, ast.expr) and isinstance(new, ast.expr):
            return [old], [new]
        return tuple([ast.Expr(side)] if isinstance(side, ast.expr) else list(side) for side in (old, new))  # type: ignore[return-value]


def read(path: Path) -> Iterator[PlantedError]:
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # every value is text
    for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=loader):
        tests = entry["tests"] if isinstance(entry.get("tests"), list) else [entry.get("tests")]
        values = [value for name, value in entry.items() if name != "tests"]
        if set(entry) - {"which", "hangs"} != FIELDS or not all(isinstance(one, str) for one in [*tests, *values]):
            raise ValueError(
                f"{path.name}: {entry} must have the texts {sorted(FIELDS)}, and may have which and hangs. Code with [, {{ "
                "or ': ' goes into a block after |-"
            )
        file, _, symbol = entry["in"].partition("::")
        options = {"hangs": "hangs" in entry, "which": entry.get("which", "")}
        yield PlantedError(entry["what"], file, symbol, entry["from"], entry["to"], tuple(tests), **options)


def listed() -> tuple[PlantedError, ...]:
    tables = sorted(Path(__file__).with_name("errors").glob("*.yaml"))
    return tuple(error for path in tables for error in read(path))
