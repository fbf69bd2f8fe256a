"""runs.jsonl, the only data: one row a run; suite.json, the request. Tables and figures derive from the two. And unfinished/, with runs
that are under way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_grpo.config.parsing import ConfigError
from sage_grpo.tools.compare.design import Suite, suite_from
from sage_grpo.utils.json_schema import demand, misfit, parse_json, read_object, shown
from sage_grpo.utils.safe_io import inside, replace_text

ROWS, SUITE, UNFINISHED = "runs.jsonl", "suite.json", "unfinished"
KEPT = (ROWS, SUITE, UNFINISHED, "configs", "logs", "weights")
"""Names that a comparison writes and deletes in its folder, besides files that it replaces. None may lead out."""
FORMAT = 1
KEPT_EVERY = 60.0
"""Seconds after which a run under way is saved between two evaluated points, too."""
FINISHED = ("done", "diverged")
"""Final states: divergence is a result. A failed run is tried again by the next call."""


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file; an incomplete last line is left out, any other damage is an error."""
    inside(file.parent, file.name)
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            fault = _fault(row)
        except ValueError:
            if number == len(lines):
                break
            fault = "it is not JSON."
        if fault:
            raise ConfigError(
                f"{file}, line {number}: {fault} Remove the line (its run is then done again), or restore the file from a copy."
            )
        rows.append(row)
    return rows


HEAD = {
    "arm": str, "recipe": str, "seed": int, "key": str, "kind": str, "status": str, "error": str | None, "iterations": int,
    "settings": dict[str, Any],
}  # fmt: skip
"""Fields of every row, with their types."""
MEASURED = {
    "evaluations": dict[int, dict[str, float | None]], "passes": dict[int, float], "updates": int, "seconds": dict[str, float],
    "clips": dict[int, float], "budgets": dict[str, int], "by_prompt": dict[int, dict[str, list[float | None]]],
    "steps": dict[int, dict[str, float | None]], "training": dict[str, list[float | None]], "reached": int, "commit": str | None,
    "code": str | None,
}  # fmt: skip
"""Fields of rows of runs that measured something."""


def _fault(row: Any) -> str:
    """The fault of a row, in a sentence: a folder may come from another user, and tables trust its rows."""
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        return f"it is not a row of format {FORMAT} that `sage-grpo compare` writes."
    finished = row.get("status") in FINISHED
    for name in (*HEAD, *(("evaluations", "passes", "updates", "seconds") if finished else ())):
        if name not in row:
            return f"it lacks {name!r}."
    for name, hint in (HEAD | MEASURED).items():
        if name in row and (fault := misfit(row[name], hint, name)):
            return fault
    if finished and not row["evaluations"].keys() <= row["passes"].keys():
        return "it has evaluations without the passes that they took."
    if finished and not {"iteration", "evaluate", "total"} <= row["seconds"].keys():
        return "seconds must be those of an iteration, of an evaluation and in total."
    rewards = row["settings"].get("rewards", [])
    if fault := misfit(rewards, list[dict[str, Any]], "settings.rewards"):
        return fault
    nameless = [one for one in rewards if not isinstance(one.get("name"), str)]
    return f"a reward among its settings has no name: {shown(nameless[0])}." if nameless else ""


def repair(file: Path) -> bool:
    """Cut off an incomplete last line; returns True if there was one."""
    content = file.read_bytes() if file.is_file() else b""
    rows = read_rows(file)
    if content.count(b"\n") == len(rows) and content[-1:] in (b"", b"\n"):
        return False
    replace_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return True


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Add a row; it is on disk when this returns."""
    with file.open("ab") as stream:
        stream.write(json.dumps(row).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def latest(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The valid row of every key: the last one that is finished, else the last."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = found.get(row["key"])
        if row["key"] in keys and (known is None or row["status"] in FINISHED or known["status"] not in FINISHED):
            found[row["key"]] = dict(row)
    return found


def save_suite(folder: Path, suite: Suite, keys: Sequence[str], command: str) -> None:
    content = {"format": FORMAT, "suite": asdict(suite), "keys": list(keys), "command": command}
    replace_text(folder / SUITE, json.dumps(content, indent=1) + "\n")


def load_suite(folder: Path) -> tuple[Suite, list[str], str]:
    """The suite of a folder, the keys of its runs, and the command."""
    file = inside(folder, SUITE)
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a comparison: it has no {SUITE}.")
    try:
        content = read_object(file)
        demand(content, {"suite": Suite, "keys": list[str], "command": str}, str(file))
        return suite_from(content["suite"]), list(content["keys"]), str(content["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is damaged ({error}): run the comparison's command again, finished runs are kept."
        ) from error


def place(folder: Path, key: str) -> Path:
    return inside(folder, UNFINISHED, key)


def kept(folder: Path, keys: Iterable[str]) -> dict[str, int]:
    """By key: the last saved iteration of an unfinished run."""
    found = {key: [int(point.name) for point in place(folder, key).glob("*") if point.name.isdigit()] for key in keys}
    return {key: max(numbers) for key, numbers in found.items() if numbers}


def forget(folder: Path, key: str) -> None:
    shutil.rmtree(place(folder, key), ignore_errors=True)
    with suppress(OSError):  # other runs remain
        (folder / UNFINISHED).rmdir()
