"""Examples: clips to learn from in place of rollouts, in rows of a prompt with a better clip and a worse one, or with one clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_grpo.data.prompts import Prompt, prompt_of, read_rows, text_of
from sage_grpo.utils.json_schema import shown
from sage_grpo.utils.suggest import did_you_mean

LISTS = ("pairs.jsonl", "clips.jsonl")
"""File names of the list in a folder."""
COLUMNS = ("win", "lose", "clip")


def list_of(source: str | Path) -> Path:
    """The file that lists the examples of `data.clips`, which is that file or its folder."""
    place = Path(source).expanduser()
    if not place.is_dir():
        if place.suffix not in (".jsonl", ".csv"):
            raise ValueError(
                f"data.clips {place}: examples are listed in a .jsonl or .csv file, or in {' or '.join(LISTS)} of a folder."
            )
        return place
    lists = [place / name for name in LISTS if (place / name).is_file()]
    if len(lists) != 1:
        count = "both" if lists else "neither"
        raise ValueError(
            f"data.clips {place}: the folder has {count} of {' and '.join(LISTS)}; name the file that counts."
        )
    return lists[0]


def load_examples(source: str | Path, *, pairs: bool) -> list[Prompt]:
    """The rows of `data.clips` as prompts with their clips, two of each for `pairs`. Only the list is read here."""
    path = list_of(source)
    if not path.is_file():
        raise FileNotFoundError(f"data.clips: there is no file {path}.")
    rows = read_rows(text_of(path), path)
    examples = [_example(row, f"{path}, line {number}", path.parent, pairs) for number, row in rows]
    if not examples:
        raise ValueError(f"data.clips {path} has no row.")
    return examples


def _example(row: Mapping[str, Any], where: str, folder: Path, pairs: bool) -> Prompt:
    named = [name for name in COLUMNS if row.get(name)]
    if named not in (["win", "lose"], ["clip"]):
        near = next(filter(None, (did_you_mean(name, COLUMNS, 0.8) for name in row if name not in COLUMNS)), "")
        raise ValueError(f"{where}: a row has the columns win and lose, or clip; this one has {', '.join(row)}.{near}")
    if pairs and named == ["clip"]:
        raise ValueError(
            f"{where}: there is one clip, but objective.kind dpo learns from pairs: give win and lose, or use sft (method rft)."
        )
    # Of a pair sft learns the better clip.
    clips = tuple(_file(row[name], name, where, folder) for name in (named if pairs else named[:1]))
    rest = {name: value for name, value in row.items() if name not in COLUMNS}
    return replace(prompt_of(rest, where, folder), clips=clips)


def _file(value: object, name: str, where: str, folder: Path) -> Path:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be the path of a clip, got {shown(value)}.")
    file = folder / value
    if not file.is_file():
        raise FileNotFoundError(f"{where}: there is no clip {file} (paths are relative to the list).")
    return file
