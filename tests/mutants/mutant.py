"""The old format of planted errors, read until the last table of it is gone: text that occurs once in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mutants.error import PACKAGE


@dataclass(frozen=True)
class Mutant:
    """An error that someone could make, and the tests that must see it."""

    what: str
    """The error in one line."""
    file: str
    """Where it is planted, under src/sage_grpo."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Node ids under tests/; the first that fails is enough."""
    hangs: bool = False
    """Whether running into the time limit counts as noticed."""
    cpu_limit: int = 0

    def fault(self, root: Path) -> str | None:
        """Why it cannot be planted in the tree at `root`, or None."""
        source = (root / PACKAGE / self.file).read_text(encoding="utf-8") if self._place(root).is_file() else ""
        count = source.count(self.old)
        if count != 1:
            return f"{self.file} holds the text {count} times instead of once: {self.old.strip().splitlines()[0]!r}"
        if self.new == self.old:
            return f"{self.file}: nothing would change"
        return None

    def source(self, root: Path) -> str:
        """The file with the error in it."""
        return self._place(root).read_text(encoding="utf-8").replace(self.old, self.new)

    @property
    def place(self) -> str:
        """The file."""
        return self.file

    def planted(self, root: Path) -> tuple[Path, str]:
        """The file under `root`, and its text with the error in it."""
        return Path(PACKAGE, self.file), self.source(root)

    def _place(self, root: Path) -> Path:
        return root / PACKAGE / self.file
