"""One planted error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mutants import pattern

PACKAGE = "src/sage_grpo"


@dataclass(frozen=True)
class PlantedError:
    """An error that someone could make, and the tests that must see it."""

    what: str
    """The error in one line."""
    file: str
    """Where its symbol was last seen, under src/sage_grpo. A symbol that has moved is looked for in the whole package."""
    symbol: str
    """The function, method (`Class.method`) or assigned name that holds it; empty: the module."""
    old: str
    """Python that stands there once (see pattern.py); in a file that is not Python a text that stands there once."""
    new: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Node ids under tests/, the most specific first; the first that fails is enough."""
    hangs: bool = False
    """Whether running into the time limit counts as noticed."""
    which: str = ""
    """Where the pattern fits several times: "2 of 3"."""
    table: str = ""
    """The file that lists it."""
    cpu_limit: int = 0
    """Seconds of a core that its tests may take; 0: no limit but the tool's."""

    @property
    def place(self) -> str:
        """File and symbol."""
        return f"{self.file}::{self.symbol}" if self.symbol else self.file

    def fault(self, root: Path) -> str | None:
        """Why it cannot be planted in the tree at `root`, or None."""
        try:
            self.located(root)
        except DoesNotFit as error:
            return f"{self.table}: {self.what}: {error}"
        return None

    def planted(self, root: Path) -> tuple[Path, str]:
        """The file under `root`, and its text with the error in it."""
        path, source, spot = self.located(root)
        changed = (
            source.replace(self.old, self.new) if spot is None else pattern.replaced(source, spot, self.old, self.new)
        )
        return path.relative_to(root), changed

    def located(self, root: Path) -> tuple[Path, str, pattern.Spot | None]:
        """Its file, what stands in it, and where the error goes (None: a text, not Python)."""
        path, spot = self._found(root)
        source = path.read_text(encoding="utf-8")
        try:
            changes = self.old != self.new if spot is None else pattern.change(source, spot, self.old, self.new).changes
        except SyntaxError as error:
            raise DoesNotFit(f"{self.place} cannot hold {_short(self.new)} there: {error.msg}") from error
        if not changes:
            raise DoesNotFit(f"nothing would change in {self.place}")
        return path, source, spot

    def _found(self, root: Path) -> tuple[Path, pattern.Spot | None]:
        own = root / PACKAGE / self.file
        if not self.file.endswith(".py"):
            count = own.read_text(encoding="utf-8").count(self.old) if own.is_file() else 0
            if count != 1:
                raise DoesNotFit(f"{self.file} holds the text {count} times instead of once: {_short(self.old)}")
            return own, None
        for text in (self.old, self.new):
            try:
                pattern.code(text)
            except SyntaxError as error:
                raise DoesNotFit(f"not Python ({error.msg}): {_short(text)}") from error
        spots = self._spots(own)
        if spots is None:
            own, spots = self._moved(root)
        return own, self._chosen(spots, own, root)

    def _spots(self, path: Path) -> list[pattern.Spot] | None:
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        return pattern.places(source, self.symbol, self.old) if source else None

    def _moved(self, root: Path) -> tuple[Path, list[pattern.Spot]]:
        """The only file that has the symbol, or the only one of several where the pattern fits."""
        known = [(path, spots) for path in package_files(root) if (spots := self._spots(path)) is not None]
        fitting = [pair for pair in known if pair[1]] if len(known) > 1 else known
        if len(fitting) != 1:
            names = ", ".join(path.relative_to(root / PACKAGE).as_posix() for path, _ in fitting or known) or "no file"
            raise DoesNotFit(
                f"{self.symbol or 'the module'} is not in {self.file} any more but in {names}{self._elsewhere(root)}"
            )
        return fitting[0]

    def _chosen(self, spots: list[pattern.Spot], path: Path, root: Path) -> pattern.Spot:
        number, _, count = self.which.partition(" of ")
        if len(spots) != int(count or 1):
            where = "" if spots else self._elsewhere(root)
            raise DoesNotFit(
                f"{self.place} holds it {len(spots)} times instead of {count or 'once'}: {_short(self.old)}{where}"
            )
        return spots[int(number or 1) - 1]

    def _elsewhere(self, root: Path) -> str:
        """Where the pattern stands now, for the one who brings the entry up to date."""
        found = []
        for path in package_files(root):
            source = path.read_text(encoding="utf-8")
            names = pattern.symbols(source) if pattern.places(source, "", self.old) else ()
            file = path.relative_to(root / PACKAGE).as_posix()
            found += [f"{file}::{name}" for name in names if pattern.places(source, name, self.old)]
        return f" (it stands in {', '.join(found[:4])})" if found else ""


class DoesNotFit(Exception):
    """An entry that names what is not there."""


@lru_cache(maxsize=8)
def package_files(root: Path) -> tuple[Path, ...]:
    """The package's Python files."""
    return tuple(sorted((root / PACKAGE).rglob("*.py")))


def _short(text: str) -> str:
    return repr(text.strip().splitlines()[0]) if text.strip() else "nothing"
