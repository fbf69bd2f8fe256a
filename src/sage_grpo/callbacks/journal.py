"""Writes a run's rows: metrics and events.

metrics.jsonl has one row per iteration, and one per evaluation. It is authoritative; loggers are views of it. Every
checkpoint has a copy of the rows so far, under its checksum. A resumed run compares: a file that begins with those rows
is intact, and later rows are computed again; any other is moved aside and rewritten.

events.jsonl is for people: starts, resumes, failed rewards, stops, interventions. Rows are only ever appended, also by
a run that continues from an earlier checkpoint.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sage_grpo.utils.json_schema import finite, is_number, parse_json, shown
from sage_grpo.utils.safe_io import replacing

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
LONGEST = 2000  # characters of an event's text; a reward's traceback does not belong here


class Journal:
    """The rows of a run, in memory and on disk; a file that does not consist of the given rows is replaced."""

    def __init__(self, file: Path, rows: bytes = b"") -> None:
        self.file, self.rows = file, bytearray(rows)
        if not file.is_file() or file.read_bytes() != rows:
            self._write_all()

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append a row; on disk before it returns. On a full disk it warns, and writes the row with the next one."""
        row = {"iteration": iteration, **{name: finite(float(value)) for name, value in metrics.items()}}
        line = json.dumps(row).encode() + b"\n"
        whole = self.file.is_file() and self.file.stat().st_size == len(self.rows)
        self.rows += line
        try:
            if whole:
                with self.file.open("ab") as stream:
                    _put(stream, line)
            else:  # an earlier row is missing: its disk was full, or the file was changed
                self._write_all()
        except OSError as error:
            warnings.warn(
                f"{self.file} could not be written ({error}): row {iteration} is kept and written later.", stacklevel=2
            )

    def _write_all(self) -> None:
        with replacing(self.file, suffix=".partial") as fresh, fresh.open("wb") as stream:
            _put(stream, bytes(self.rows))


def reopen(file: Path, recorded: bytes | None) -> tuple[Journal, str]:
    """Continue a journal from a checkpoint's copy of it (None: empty); returns it with a notice, empty if the file is
    intact. A file with other rows than the recorded ones is moved aside, not lost."""
    content = file.read_bytes() if file.is_file() else b""
    notice = ""
    if recorded is None and content.strip():
        rows = len(read_rows(file))
        notice = (
            f"{file} has {rows} row{'s' * (rows != 1)}, but there is no checkpoint to continue from: the run starts anew. "
            f"They are kept in {_aside(file, 'old')}."
        )
    elif recorded is not None and not content.startswith(recorded):
        damage, kept = "it is missing or empty", ""
        if content:
            wanted, lines = recorded.splitlines(keepends=True), content.splitlines(keepends=True)
            first = next((n for n, line in enumerate(wanted) if lines[n : n + 1] != [line]))
            damage = f"line {first + 1} of {len(wanted)} is not as the run wrote it"
            kept = f" The damaged file is kept in {_aside(file, 'damaged')}."
        notice = f"{file} was damaged ({damage}): its rows were restored from the checkpoint.{kept}"
    return Journal(file, recorded or b""), notice


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of any run's journal: numbers by name, and None for missing values. A line that a kill cut short is
    left out; so is one that no run writes, with a warning that names it."""
    rows = []
    for number, row in _parsed(file):
        if odd := _odd(row):
            warnings.warn(f"{file}, line {number} is not a row of a run and is left out: {odd}.", stacklevel=2)
        else:
            rows.append(finite(row))
    return rows


def _parsed(file: Path) -> Iterator[tuple[int, Any]]:
    """The lines of a file that are JSON, with their numbers from 1."""
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else [], 1):
        with suppress(ValueError):
            yield number, parse_json(line)


def _odd(row: Any) -> str:
    """Text on the part of a row that no run writes; empty if it is valid."""
    if not isinstance(row, dict):
        return f"it holds {shown(row)}"
    for name, value in row.items():
        if value is not None and not (is_number(value) or isinstance(value, float)):
            return f"{name} is {shown(value)}"
    iteration = row.get("iteration")
    return "" if isinstance(iteration, int) and iteration >= 0 else f"iteration is {shown(iteration)}"


def _aside(file: Path, why: str) -> Path:
    number = 1
    while (target := file.with_name(f"{file.stem}.{why}-{number}{file.suffix}")).exists():
        number += 1
    os.replace(file, target)
    return target


def _put(stream: Any, content: bytes) -> None:
    stream.write(content)
    stream.flush()
    os.fsync(stream.fileno())


def note(out: Path, kind: str, iteration: int, text: str) -> None:
    """Append an event. `kind` is one word: start, resume, failed, best, stop, finish, diverged, sentinel."""
    row = {"time": round(time.time(), 3), "kind": kind, "iteration": iteration, "text": text[:LONGEST]}
    with (out / EVENTS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_events(out: Path) -> list[dict[str, Any]]:
    return [
        {
            "time": row.get("time") if is_number(row.get("time")) else None,
            "kind": row["kind"],
            "iteration": int(row["iteration"]),
            "text": str(row.get("text", "")),
        }
        for _, row in _parsed(out / EVENTS)
        if isinstance(row, dict) and is_number(row.get("iteration")) and isinstance(row.get("kind"), str)
    ]
