"""Letters of any script in pictures: fonts of this machine that have them, and an open word where none does.

matplotlib's own face (DejaVu Sans) knows Latin, Greek, Cyrillic, Arabic and more, but no Chinese, Japanese or Korean. A letter that no
font has would become an empty box that looks like an error of the model's; it becomes a dot here, and whoever draws says so.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOT = "·"
LIKELY = (
    "Noto Sans",
    "Source Han",
    "CJK",
    "WenQuanYi",
    "Droid Sans Fallback",
    "Unifont",
    "PingFang",
    "YaHei",
    "Gothic",
    "Emoji",
    "Symbola",
)
"""Parts of the names of faces that are worth a look first."""


@dataclass(frozen=True)
class Lettering:
    """Which faces write some texts."""

    families: tuple[str, ...]
    """Their names, matplotlib's own first."""
    files: tuple[Path, ...]
    missing: tuple[str, ...]
    """Letters that none of them has."""

    def show(self, text: str) -> str:
        """A text as it can be written: in one line, with a dot for a letter that cannot."""
        return "".join(DOT if letter in self.missing else letter for letter in _letters(text))

    def pieces(self, text: str) -> list[tuple[Path, str]]:
        """A text cut where the face changes, each piece with the file of its face."""
        found: list[tuple[Path, str]] = []
        for letter in self.show(text):
            file = next((file for file in self.files if letter in _letters_of(file)), self.files[0])
            if found and (found[-1][0] == file or letter == " "):
                found[-1] = (found[-1][0], found[-1][1] + letter)
            else:
                found.append((file, letter))
        return found

    @property
    def remark(self) -> str:
        """What a reader should know; empty where every letter is there."""
        if not self.missing:
            return ""
        some = ", ".join(f"U+{ord(letter):04X}" for letter in self.missing[:4]) + (
            ", ..." if len(self.missing) > 4 else ""
        )
        return f"{DOT} stands for letters that no font of this machine has ({some}; Debian's fonts-noto-cjk has most)."


def lettering(texts: Iterable[str]) -> Lettering:
    """The fewest faces that write these texts: the usual one, and others only for what it lacks."""
    from matplotlib import font_manager

    own = Path(font_manager.findfont("DejaVu Sans"))
    families, files = ["DejaVu Sans"], [own]
    lacking = {letter for text in texts for letter in _letters(text)} - _letters_of(own)
    if lacking:
        listed = {entry.fname: entry.name for entry in font_manager.fontManager.ttflist if entry.style == "normal"}
        order = sorted(listed.items(), key=lambda one: (not any(part in one[1] for part in LIKELY), one[1], one[0]))
        for file, name in order:
            found = lacking & _letters_of(Path(file))
            if found:
                families.append(name)
                files.append(Path(file))
                lacking -= found
            if not lacking:
                break
    return Lettering(tuple(families), tuple(files), tuple(sorted(lacking)))


def _letters(text: str) -> str:
    """One line without controls, and without marks that only say how an emoji is to look."""
    flat = " ".join(text.split())
    return "".join(
        letter
        for letter in flat
        if unicodedata.category(letter) not in ("Cc", "Cf", "Cs") and not "\ufe00" <= letter <= "\ufe0f"
    )


@cache
def _letters_of(file: Path) -> frozenset[str]:
    """Letters that a face has as outlines; none where it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        face = FT2Font(str(file))
        if not face.scalable:  # coloured emoji are pictures, which matplotlib cannot draw
            return frozenset()
        return frozenset(map(chr, face.get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()
