"""Prompts from txt, csv or jsonl files, and an endless shuffled stream of them with a position that can be saved."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One task for the model."""

    text: str
    seed: int | None = None
    """Fixes the initial noise of this prompt's rollouts; None derives it from the run's seed."""
    image: Path | None = None
    """First frame for image-to-video models."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts: .txt (one a line, # comments), .csv (columns prompt, seed, image) or .jsonl (the same keys)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no prompt file {path}. Give a .txt, .csv or .jsonl file.")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".txt":
        lines = (line.strip() for line in text.splitlines())
        prompts = [Prompt(line) for line in lines if line and not line.startswith("#")]
    elif path.suffix == ".csv":
        prompts = [_from_row(row, path, n) for n, row in enumerate(csv.DictReader(text.splitlines(keepends=True)), 2)]
    elif path.suffix == ".jsonl":
        prompts = [_from_json(line, path, n) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        raise ValueError(f"{path}: unknown kind of prompt file {path.suffix!r}; use .txt, .csv or .jsonl.")
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def _from_json(line: str, path: Path, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error}.") from error
    if not isinstance(row, (str, dict)):
        raise ValueError(f"{path}, line {number}: expected an object with a prompt, or a string, got {line.strip()!r}.")
    return _from_row({"prompt": row} if isinstance(row, str) else row, path, number)


def _from_row(row: dict[str, object], path: Path, number: int) -> Prompt:
    unknown = sorted(str(key) for key in set(row) - {"prompt", "seed", "image"})
    if unknown:
        raise ValueError(f"{path}, line {number}: unknown columns {unknown}; use prompt, seed and image.")
    text = str(row.get("prompt") or "").strip()
    if not text:
        raise ValueError(f"{path}, line {number}: the prompt is empty.")
    seed, image = row.get("seed"), row.get("image")
    try:
        number_or_none = None if seed in (None, "") else int(str(seed))
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: seed must be a whole number, got {seed!r}.") from error
    file = None if not image else (path.parent / str(image))
    if file is not None and not file.is_file():
        raise FileNotFoundError(
            f"{path}, line {number}: there is no image {file} (paths are relative to the prompt file)."
        )
    return Prompt(text, number_or_none, file)


class PromptStream:
    """Endless prompts, shuffled anew every epoch by (seed, epoch); `position` is all its state."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("A prompt stream needs at least one prompt.")
        self.prompts = list(prompts)
        self.seed = seed
        self.position = 0
        self._epoch: int | None = None
        self._order: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; an epoch that ends inside goes over into the next one."""
        taken = [self._at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.prompts)))
            random.Random(f"prompts/{self.seed}/{epoch}").shuffle(self._order)
        return self.prompts[self._order[place]]
