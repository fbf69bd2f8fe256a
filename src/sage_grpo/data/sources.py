"""Sources of prompts besides plain files: folders with a training and a test file, parquet files, datasets of the hub, and several sources by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sage_grpo.config.ranges import Folder, Positive, checked
from sage_grpo.utils.hub import pinned_dataset

Split = Literal["train", "heldout"]
TEXTS = (".txt", ".csv", ".json", ".jsonl")
"""Kinds of prompt files that are text."""
STEMS: Mapping[Split, str] = {"train": "train", "heldout": "test"}
"""Names of the files of a folder, and of the splits of a dataset."""
KINDS = ("_metadata.jsonl", ".jsonl", ".parquet", ".csv", ".json", ".txt")
"""Ends of the files of a folder; one with columns goes before the same prompts without them."""
HUB = "hf:"


@checked
class PromptSource:
    """One of several sources of training prompts."""

    path: Folder
    """A file, folder, set or dataset of the hub, as in data.prompts."""
    weight: Positive = 1.0
    """Share of the drawn prompts, relative to the other sources' weights."""


def split_file(folder: Path, split: Split) -> Path | None:
    """The file of a split in a folder, as flow_grpo and Flow-Factory lay it out."""
    files = (folder / f"{STEMS[split]}{kind}" for kind in KINDS)
    return next((file for file in files if file.is_file()), None)


def _library(name: str, extra: str, source: object) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f'{source} needs a package that is not installed: pip install "sage-grpo[{extra}]".'
        ) from error


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    arrow = _library("pyarrow", "parquet", path)
    try:
        rows = _library("pyarrow.parquet", "parquet", path).read_table(path).to_pylist()
    except arrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def dataset_rows(name: str, split: Split) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of `hf:owner/name@COMMIT`, or with `:SPLIT` at the end. Only data is read: `datasets` of this version runs no code of a repository."""
    repo, commit, given = pinned_dataset(name.removeprefix(HUB))
    datasets = _library("datasets", "datasets", name)
    if int(datasets.__version__.split(".")[0]) < 4:
        raise ValueError(
            f"{name}: datasets {datasets.__version__} can run code of a repository; pip install -U 'datasets>=4'."
        )
    try:
        rows = datasets.load_dataset(repo, revision=commit, split=given or STEMS[split])
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded ({type(error).__name__}: {error}).") from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row
