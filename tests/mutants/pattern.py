"""Find a piece of Python by the symbol that holds it and a pattern, and put another in its place.

A pattern is Python, an expression or statements, and is compared with the syntax tree: line breaks, comments, quotes and brackets that
change nothing do not matter. `...` as the only statement of a block fits any block; in the replacement it stands for that block.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Step = tuple[str, int | None]
Code = ast.expr | list[ast.stmt]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Spot:
    """A node, or some statements of a block, by the way that leads there from the module."""

    way: tuple[Step, ...]
    """From the module to the node (of several statements: to the first)."""
    count: int = 1
    """How many statements."""

    def block(self, tree: ast.AST) -> tuple[ast.AST, str, int | None]:
        """The node above, its field, and the place in that field."""
        for step in self.way[:-1]:
            tree = child(tree, step)
        return tree, *self.way[-1]

    def nodes(self, tree: ast.AST) -> list[ast.AST]:
        """What stands there."""
        above, name, index = self.block(tree)
        return [getattr(above, name)] if index is None else getattr(above, name)[index : index + self.count]


def child(node: ast.AST, step: Step) -> ast.AST:
    """The node at one step below."""
    value = getattr(node, step[0])
    return value if step[1] is None else value[step[1]]


@lru_cache(maxsize=512)
def parsed(source: str) -> ast.Module:
    """The syntax tree; shared, so nobody may change it."""
    return ast.parse(source)


@lru_cache(maxsize=4096)
def code(text: str) -> Code:
    """A pattern or replacement as Python: an expression where it is one, else statements."""
    body = ast.parse(textwrap.dedent(text).strip("\n")).body
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) and not _is_hole(body) else body


def _is_hole(body: object) -> bool:
    return (
        isinstance(body, list)
        and len(body) == 1
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and body[0].value.value is ...
    )


def same(one: object, other: object) -> bool:
    """Whether two trees mean the same program."""
    return fits(one, other, None)


def fits(pattern: object, found: object, holes: list[list[ast.stmt]] | None) -> bool:
    """Whether a pattern fits; `holes` takes the blocks that stand where the pattern has `...` (None: it is taken literally)."""
    if isinstance(pattern, list):
        if holes is not None and _is_hole(pattern) and isinstance(found, list) and found:
            holes.append(found)
            return True
        return (
            isinstance(found, list)
            and len(pattern) == len(found)
            and all(fits(a, b, holes) for a, b in zip(pattern, found))
        )
    if type(pattern) is not type(found):
        return False
    if isinstance(pattern, ast.AST):
        names = [name for name in pattern._fields if name not in ("ctx", "kind", "type_comment")]
        return all(fits(getattr(pattern, name, None), getattr(found, name, None), holes) for name in names)
    return pattern == found


def children(node: ast.AST) -> Iterator[tuple[Step, ast.AST]]:
    """The nodes below one, in the order of the source."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield (name, index), item


def walk(node: ast.AST, way: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], ast.AST]]:
    """All nodes with the ways to them, each before those below it."""
    yield way, node
    for step, child in children(node):
        yield from walk(child, (*way, step))


@lru_cache(maxsize=512)
def symbols(source: str) -> dict[str, list[tuple[Step, ...]]]:
    """Qualified name -> the ways to what defines it: functions and classes, and what is assigned in the module or in a class."""
    found: dict[str, list[tuple[Step, ...]]] = {}

    def look(node: ast.AST, way: tuple[Step, ...], prefix: str) -> None:
        for step, child in children(node):
            here = (*way, step)
            if isinstance(child, DEFINITIONS):
                found.setdefault(prefix + child.name, []).append(here)
                if isinstance(child, ast.ClassDef):
                    look(child, here, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(prefix + target.id, []).append(here)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                look(child, here, prefix)

    look(parsed(source), (), "")
    return found


def holder(known: dict[str, list[tuple[Step, ...]]], way: tuple[Step, ...]) -> str:
    """The innermost of some symbols that holds what is at the end of a way; empty: the module."""
    depth = {
        name: max([len(root) for root in roots if way[: len(root)] == root], default=0) for name, roots in known.items()
    }
    return max(depth, key=lambda name: depth[name]) if any(depth.values()) else ""


def places(source: str, symbol: str, pattern: str) -> list[Spot] | None:
    """Where the pattern fits within the symbol (all of the module where the symbol is empty); None where there is no such symbol."""
    tree = parsed(source)
    roots: list[tuple[Step, ...]] = symbols(source).get(symbol, []) if symbol else [()]
    if not roots:
        return None
    wanted = code(pattern)
    spots: list[Spot] = []
    for root in roots:
        first = Spot(root).nodes(tree)[0] if root else tree
        for way, node in walk(first, root):
            if isinstance(wanted, list):
                if way and isinstance(node, ast.stmt) and _statements_fit(wanted, Spot(way, len(wanted)), tree, root):
                    spots.append(Spot(way, len(wanted)))
            elif isinstance(node, ast.expr) and fits(wanted, node, []):
                spots.append(Spot(way))
    return spots


def _statements_fit(wanted: list[ast.stmt], spot: Spot, tree: ast.Module, root: tuple[Step, ...]) -> bool:
    found = spot.nodes(tree)
    inside = len(spot.way) > len(root) or len(found) == 1  # what stands after the symbol is not part of it
    return inside and len(found) == len(wanted) and all(fits(a, b, []) for a, b in zip(wanted, found))


@dataclass(frozen=True)
class Change:
    """What is to stand where."""

    spot: Spot
    old: list[ast.AST]
    new: list[ast.AST]
    texts: tuple[str, ...]
    """Ways to write it; one of them means what it should."""

    @property
    def changes(self) -> bool:
        """Whether it is another program."""
        return not same(self.old, self.new)


def change(source: str, spot: Spot, pattern: str, replacement: str) -> Change:
    """Put together what stands there and what is to stand there."""
    tree, wanted, new = parsed(source), code(pattern), copy.deepcopy(code(replacement))
    found = spot.nodes(tree)
    holes: list[list[ast.stmt]] = []
    fits(wanted if isinstance(wanted, list) else [wanted], found, holes)
    text = textwrap.dedent(replacement).strip("\n")
    if isinstance(new, ast.expr) and isinstance(found[0], ast.expr):
        return Change(spot, found, [new], (text, f"({text})"))
    if isinstance(found[0], ast.expr):  # a call that is a statement
        spot = Spot(spot.way[:-1])
        found = spot.nodes(tree)
        if not isinstance(found[0], ast.Expr):
            raise SyntaxError("statements in the place of an expression")
    body = _filled(new, list(holes)) if isinstance(new, list) else [ast.Expr(new)]
    whole = "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in body)
    return Change(spot, found, list(body), (whole,) if holes else (text, whole))


def replaced(source: str, spot: Spot, pattern: str, replacement: str) -> str:
    """The source with the replacement at that place; the rest keeps its text where that is possible."""
    one = change(source, spot, pattern, replacement)
    tree = _put(parsed(source), one.spot.way, one.spot.count, one.new)
    lines = source.encode().splitlines(keepends=True)
    ends = _extent(one.old)
    for text in one.texts:
        changed = _written(lines, ends, text)
        if _is(changed, tree, one.spot):
            return changed
    return _rewritten(source, lines, one.spot, tree)


def _filled(body: list[ast.stmt], holes: list[list[ast.stmt]]) -> list[ast.stmt]:
    """Blocks that are only `...` get what stood there."""
    if _is_hole(body) and holes:
        return holes.pop(0)
    for _, node in (pair for statement in body for pair in walk(statement)):
        for name in ("body", "orelse", "finalbody"):
            if holes and _is_hole(getattr(node, name, None)):
                setattr(node, name, holes.pop(0))
    return body


def _put(node: ast.AST, way: tuple[Step, ...], count: int, new: list[ast.AST]) -> ast.AST:
    """A tree with other nodes at the end of a way; all that is not on the way is shared."""
    (name, index), rest = way[0], way[1:]
    above, value = copy.copy(node), getattr(node, way[0][0])
    put = [_put(child(node, way[0]), rest, count, new)] if rest else new
    if index is None:
        setattr(above, name, put[0])
    else:
        setattr(above, name, [*value[:index], *put, *value[index + (1 if rest else count) :]])
    return above


def _extent(nodes: list[ast.AST]) -> tuple[int, int, int, int]:
    """First line and column and last line and column (bytes), with decorators."""
    first, last = nodes[0], nodes[-1]
    top = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", ()))])  # type: ignore[attr-defined]
    return top - 1, first.col_offset, last.end_lineno - 1, last.end_col_offset  # type: ignore[attr-defined]


def _written(lines: list[bytes], ends: tuple[int, int, int, int], text: str) -> str:
    top, left, bottom, right = ends
    own = lines[top][:left]
    indent = own[: len(own) - len(own.lstrip())].decode()
    body = text.replace("\n", "\n" + indent).encode()
    return b"".join([*lines[:top], own, body, lines[bottom][right:], *lines[bottom + 1 :]]).decode()


def _is(source: str, tree: ast.AST, spot: Spot) -> bool:
    """Whether a text means that tree; only the statement of the module in which the two may differ is compared."""
    try:
        found = ast.parse(source).body
    except SyntaxError:
        return False
    wanted, index = getattr(tree, "body", []), spot.way[0][1] or 0
    if len(spot.way) == 1:
        return same(found, wanted)
    return len(found) == len(wanted) and same(found[index], wanted[index])


def _rewritten(source: str, lines: list[bytes], spot: Spot, tree: ast.AST) -> str:
    """For what has no text of its own (within f-strings, say): the statement around it is written anew, or all of the module."""
    ast.fix_missing_locations(tree)
    for length in range(len(spot.way), 0, -1):
        outer = Spot(spot.way[:length])
        before, after = outer.nodes(parsed(source)), outer.nodes(tree)
        if before and after and isinstance(before[0], ast.stmt):
            changed = _written(lines, _extent(before), ast.unparse(after[0]))
            if _is(changed, tree, spot):
                return changed
    return ast.unparse(tree)
