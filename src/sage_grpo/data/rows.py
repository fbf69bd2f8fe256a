"""Prompts from objects: lists, generators, Hugging Face datasets, data frames; anything that gives rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sage_grpo.data.prompts import Prompt, prompt_of, warn_of_near_misses


@runtime_checkable
class Frame(Protocol):
    """A pandas data frame, which gives its columns when it is iterated."""

    def iterrows(self) -> Iterable[tuple[Any, Mapping[str, Any]]]:
        """(index, row)."""
        ...


Row = str | Mapping[str, Any] | Prompt
"""What can be made a prompt of."""


def prompts_of(rows: Iterable[Row] | Frame, what: str = "prompts") -> list[Prompt]:
    """Every row as a prompt: a string, a mapping with the columns of a prompt file (`prompt`, and if you like `seed` and `image`;
    others are metadata for rewards), or a Prompt. All rows are read now. `what` is what errors call them."""
    if isinstance(rows, (str, bytes, Path)):
        raise ValueError(
            f"{what} must be rows, got {str(rows)!r}: give a list of prompts, or name a file in the config."
        )
    if isinstance(rows, Mapping):
        raise ValueError(
            f"{what} must be rows, got a {type(rows).__name__} with the keys {', '.join(map(str, rows))[:200]}: choose a split, "
            "such as dataset['train']."
        )
    prompts = [_prompt(row, f"{what}, row {number}") for number, row in enumerate(_rows(rows, what))]
    if not prompts:
        raise ValueError(f"{what}: there is no row.")
    warn_of_near_misses({name for prompt in prompts for name in prompt.metadata}, what)
    return prompts


def _rows(rows: Iterable[Row] | Frame, what: str) -> Iterator[Any]:
    if isinstance(rows, Frame):
        return (dict(row) for _, row in rows.iterrows())
    try:
        return iter(rows)
    except TypeError as error:
        raise ValueError(f"{what} must be rows, got a {type(rows).__name__}, which gives none.") from error


def _prompt(row: Any, where: str) -> Prompt:
    if isinstance(row, Prompt):
        return row
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{where} is a {type(row).__name__}: give strings, mappings with the key prompt, or Prompt objects."
        )
    # a data frame has NaN where there is no value, and floats where a column of whole numbers has gaps
    row = {str(name): None if isinstance(value, float) and value != value else value for name, value in row.items()}
    seed = row.get("seed")
    if isinstance(seed, float) and seed.is_integer():
        row["seed"] = int(seed)
    for name in ("image", "ref_image_path"):
        row[name] = _image(row.get(name), where)
    return prompt_of(row, where, Path())


def _image(value: Any, where: str) -> str | None:
    """The file of an image. A dataset that does not decode its images gives {"path": ..., "bytes": ...}."""
    if isinstance(value, Mapping) and value.get("path"):
        value = value["path"]
    if value is None or isinstance(value, (str, Path)):
        return None if value is None else str(value)
    raise ValueError(
        f"{where}: image must be the path of a file, got a {type(value).__name__}. Save the images and give their paths."
    )
