"""The few calls of packages that the job does not need, but that are imported and a machine may lack. Nothing here is timed."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@dataclass
class DatasetInfo:
    """Writer of the files beside the peer's cache."""

    description: str = ""


class Dataset:
    """Columns in memory, as much of Hugging Face's class as one prompt needs."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.info = DatasetInfo()

    @classmethod
    def from_dict(cls, columns: dict[str, list[Any]]) -> Dataset:
        """A dataset of these columns."""
        return cls({name: list(values) for name, values in columns.items()})

    @classmethod
    def from_file(cls, path: str) -> Dataset:
        """The result of `map`."""
        return cls(torch.load(path, weights_only=True))

    @property
    def column_names(self) -> list[str]:
        """Names."""
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Arrow has no bfloat16: the real library stores and returns float32.
        row = {name: values[index] for name, values in self.columns.items()}
        half = {
            name for name, value in row.items() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        }
        return {name: value.float() if name in half else value for name, value in row.items()}

    def select(self, rows: Any) -> Dataset:
        """Some rows."""
        return Dataset({name: [values[row] for row in rows] for name, values in self.columns.items()})

    def map(
        self, function: Any, *, batch_size: int, fn_kwargs: Any, cache_file_name: str | None, **ignored: Any
    ) -> Dataset:
        """Apply to batches, and keep the result."""
        result: dict[str, list[Any]] = {}
        for start in range(0, len(self), batch_size):
            batch = {name: values[start : start + batch_size] for name, values in self.columns.items()}
            for name, values in function(batch, **(fn_kwargs or {})).items():
                result.setdefault(name, []).extend(values)
        if cache_file_name is not None:
            torch.save(result, cache_file_name)
        return Dataset(result)

    def set_format(self, **ignored: Any) -> None:
        """Rows are tensors already."""


def load_dataset(*given: Any, **named: Any) -> Dataset:
    """Prompts are given as text here."""
    raise NotImplementedError("This stand-in for `datasets` reads no files: install the package.")


def load_from_disk(path: str) -> Dataset:
    """The parts that state.json names, as one."""
    files = json.loads((Path(path) / "state.json").read_text())["_data_files"]
    parts = [Dataset.from_file(str(Path(path) / part["filename"])).columns for part in files]
    return Dataset({name: [row for part in parts for row in part[name]] for name in parts[0]})


def install() -> list[str]:
    """Stand in for what is not installed; returns its names."""
    missing = [name for name in ("datasets", "imageio", "ftfy") if importlib.util.find_spec(name) is None]
    if "datasets" in missing:
        calls = {"Dataset": Dataset, "load_dataset": load_dataset, "load_from_disk": load_from_disk}
        _module("datasets", **calls, __version__="0")
        _module("datasets.utils")
        _module("datasets.utils.logging", disable_progress_bar=lambda: None)
    if "imageio" in missing:
        _module("imageio", v3=_module("imageio.v3"))
    if "ftfy" in missing:
        _module("ftfy", fix_text=lambda text: text)  # the prompt is plain ASCII
    return missing


def _module(name: str, **content: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    module.__path__ = []
    vars(module).update(content)
    return module
