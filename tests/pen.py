"""A pen in the place of matplotlib: figures as the list of what is drawn, whatever the version of fonts and renderers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest


class Pen:
    """Stand-in for matplotlib's objects that writes down every call."""

    answers: ClassVar[dict[str, Any]] = {"get_ylim": (-0.5, 0.75)}

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Pen:
        return Pen(self.log, f"{self.name}.{name}")

    def __getitem__(self, key: object) -> Pen:
        return Pen(self.log, f"{self.name}{key}")

    def __iter__(self) -> Iterator[str]:
        yield from ("handles", "names")

    def __call__(self, *words: Any, **more: Any) -> Pen:
        said = [shown(word) for word in words] + [f"{name}={shown(value)}" for name, value in more.items()]
        self.log.append(f"{self.name}({', '.join(said)})")
        return self.answers.get(self.name.rpartition(".")[2], Pen(self.log, f"{self.name}()"))


def shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def drawing(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """The log of a module's drawing from now on; `replacing` is the module's way to write a file at once."""
    from matplotlib import pyplot

    found: list[str] = []

    def subplots(height: int, width: int, figsize: tuple[float, float], **more: Any) -> tuple[Any, Any]:
        found.append(f"{height} x {width}, {figsize[0]:.4g} x {figsize[1]:.4g} {more}")
        axes = np.empty((height, width), object)
        for place in np.ndindex(height, width):
            axes[place] = Pen(found, f"axis {place[0]} {place[1]}")
        return Pen(found, "figure"), axes if more.get("squeeze") is False or height > 1 else axes[0]

    @contextmanager
    def replacing(path: Path) -> Iterator[str]:
        yield path.name

    monkeypatch.setattr(pyplot, "subplots", subplots)
    monkeypatch.setattr(pyplot, "close", lambda figure: found.append("close"))
    monkeypatch.setattr(module, "replacing", replacing)
    return found
