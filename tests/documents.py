"""The code blocks of README.md, CONTRIBUTING.md, docs and research, for the tests that run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [file for folder in ("docs", "research") for file in sorted((ROOT / folder).rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
"""The line above a block that no test executes, with the reason. Its commands are parsed all the same."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str
    """Why no test executes it; empty where one does."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages (none: in any), in the order of the pages."""
    return [block for page in PAGES for block in _read(page) if not languages or block.language in languages]


def _read(path: Path) -> Iterator[Block]:
    lines, opened = path.read_text(encoding="utf-8").splitlines(), None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        above = next((text for text in reversed(lines[:opened]) if text.strip()), "")
        marked = NOT_RUN.fullmatch(above.strip())
        text = "".join(f"{text}\n" for text in lines[opened + 1 : number])
        language = lines[opened].strip().removeprefix("```").strip()
        yield Block(str(path.relative_to(ROOT)), opened + 1, language, text, marked[1] if marked else "")
        opened = None
    assert opened is None, f"{path}:{opened}: the block is not closed"


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def ours(words: list[str]) -> list[str] | None:
    """The words after `sage-grpo`, also where torchrun or Slurm starts it; None for another program."""
    if words[0] == "sage-grpo":
        return words[1:]
    if words[0] == "torchrun":
        return words[words.index("sage_grpo") + 1 :]
    if words[0] == "sbatch":  # what follows the script is for train
        return ["train", *words[1 + next(n for n, word in enumerate(words[1:]) if not word.startswith("-")) + 1 :]]
    return None
