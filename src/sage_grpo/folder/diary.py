"""events.jsonl: what happened to a run besides its numbers, for people: starts, resumes, failed rewards, stops, interventions.

Rows are only ever added, also by a run that continues from an earlier checkpoint: what is computed again was done twice.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sage_grpo.documents import is_number, parse_json

NAME = "events.jsonl"
LONGEST = 2000
"""Characters of a text; a reward's traceback does not belong here."""


def note(out: Path, kind: str, iteration: int, text: str) -> None:
    """Add an event. `kind` is one word: start, resume, failed, best, stop, finish, diverged, sentinel."""
    row = {"time": round(time.time(), 3), "kind": kind, "iteration": iteration, "text": text[:LONGEST]}
    with (out / NAME).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_events(out: Path) -> list[dict[str, Any]]:
    """All events in order; a line that a kill cut short is left out."""
    file, rows = out / NAME, []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and is_number(row.get("iteration")) and isinstance(row.get("kind"), str):
            rows.append(
                {
                    "time": row.get("time") if is_number(row.get("time")) else None,
                    "kind": row["kind"],
                    "iteration": int(row["iteration"]),
                    "text": str(row.get("text", "")),
                }
            )
    return rows
