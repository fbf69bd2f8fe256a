"""The lines of run.py as Markdown tables: `python table.py FILE`; `--into docs/speed.md` puts them between that file's marks.

A mark is a line `<!-- table FILE -->`, and `<!-- end of table -->` closes it. FILE is relative to the repository.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASSES = ("forward", "guided_forward", "training_pass", "guided_training_pass")
PHASES = ("rollout", "decode", "offload", "reward", "update", "other", "total")
MARK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(file: Path) -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]


def render(lines: Sequence[dict[str, Any]]) -> str:
    """Tables of every model; of lines of the same variant the last counts."""
    newest = {(line["model"], line["variant"]): line for line in lines}
    parts = [_head(line) for line in list(newest.values())[:1]]
    for model in dict.fromkeys(model for model, _ in newest):
        own = {variant: line for (other, variant), line in newest.items() if other == model}
        clip = next(iter(own.values()))["job"]
        title = f"**{model}**, {clip['frames']} frames of {clip['height']} x {clip['width']}, LoRA {clip['rank']}"
        parts += [title, _passes(own)]
        timed = {variant: line for variant, line in own.items() if "job_seconds" in line}
        if timed:
            parts += [_iteration(timed), _checks(timed)]
        parts += [
            f"{name}: {line['status']}, {line.get('error', '')}" for name, line in own.items() if line["status"] != "ok"
        ]
    return "\n\n".join(parts) + "\n"


def _head(line: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items() if number)
    commits = "".join(f"; {name} at {commit}" for name, commit in line.get("commits", {}).items() if commit)
    return f"{line['device']}; {versions}{commits}"


def _passes(lines: dict[str, dict[str, Any]]) -> str:
    """Seconds and GiB of every pass, and the floor."""
    floor = next((line["floor"]["seconds"] for line in lines.values() if "floor" in line), {})
    rows = []
    for name in PASSES:
        cells = [_pass(line, name) for line in lines.values()]
        base = _seconds(next(iter(lines.values())), name)
        least = floor.get(name)
        ratio = None if least is None or base is None else base / least
        rows.append([name.replace("_", " "), *cells, _number(least), _number(ratio)])
    first = next(iter(lines))
    return _table(["seconds (peak GiB)", *lines, "floor", f"{first} / floor"], rows)


def _seconds(line: dict[str, Any], name: str) -> float | None:
    """Of a pass; where passes were not timed alone, the mean over the iteration's."""
    if name in line.get("passes", {}):
        return line["passes"][name].get("seconds")
    timed = line.get("timed")
    if timed is None:
        return None
    part = timed["part"]
    if name == "guided_forward":
        return timed["seconds"]["rollout"] / (part["group"] * part["steps"])
    if name == "guided_training_pass":
        return timed["seconds"]["update"] / (part["group"] * part["trained"])
    return None


def _pass(line: dict[str, Any], name: str) -> str:
    peak = line.get("passes", {}).get(name, {}).get("peak_gib")
    return _number(_seconds(line, name)) + (f" ({peak:.1f})" if peak else "")


def _iteration(lines: dict[str, dict[str, Any]]) -> str:
    """Seconds of the whole job by phase with peak GiB, and every variant's total over the first's."""
    rows = []
    for phase in PHASES:
        values = [line["job_seconds"].get(phase) for line in lines.values()]
        if any(value is not None for value in values):
            peaks = [line["timed"]["peak_gib"].get(phase) for line in lines.values()]
            rows.append([phase, *(_number(v) + (f" ({p:.1f})" if p else "") for v, p in zip(values, peaks))])
    totals = [line["job_seconds"]["total"] for line in lines.values()]
    rows.append([f"total / {next(iter(lines))}", *(_number(total / totals[0]) for total in totals)])
    if any(len(line.get("totals", ())) > 1 for line in lines.values()):
        rows.append(["least and most of all", *(_range(line.get("totals", ())) for line in lines.values())])
    rows.append(["first log ratio", *(_number(line["timed"]["first_log_ratio"]) for line in lines.values())])
    return _table(["iteration: seconds (peak GiB)", *lines], rows)


def _range(totals: Sequence[float]) -> str:
    return f"{_number(min(totals))} to {_number(max(totals))} of {len(totals)}" if len(totals) > 1 else "-"


def _checks(lines: dict[str, dict[str, Any]]) -> str:
    """A line that says if all did the same work."""
    facts = {
        "clips and steps": [
            [line["timed"]["part"][key] for key in ("group", "steps", "trained")] for line in lines.values()
        ],
        "forward passes of the rollout": [line["timed"]["forwards"].get("rollout", 0) for line in lines.values()],
        "forward passes of the update": [line["timed"]["forwards"].get("update", 0) for line in lines.values()],
        "LoRA parameters": [line["lora"]["parameters"] for line in lines.values()],
    }
    words = []
    for name, values in facts.items():
        same = all(value == values[0] for value in values)
        words.append(f"{name} {values[0]}" if same else f"{name} DIFFER: {dict(zip(lines, values))}")
    return f"Same work: {'; '.join(words)}."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def fill(text: str, root: Path) -> str:
    """A document with its marked tables made anew; a table whose file is not there says so."""

    def table(match: re.Match[str]) -> str:
        file = root / match[2]
        body = render(read(file)) if file.is_file() else f"Not measured yet: there is no {match[2]}.\n"
        return f"{match[1]}{body}{match[3]}"

    return MARK.sub(table, text)


def main() -> None:
    """Print the tables of a file, or put tables into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--into", type=Path, default=None, help="a document with marks")
    options = parser.parse_args()
    if options.into is not None:
        text = fill(options.into.read_text(encoding="utf-8"), Path(__file__).parents[3])
        options.into.write_text(text, encoding="utf-8")
    if options.file is not None:
        print(render(read(options.file)))


if __name__ == "__main__":
    main()
