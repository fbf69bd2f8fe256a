"""What the tests of commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sage_grpo.utils import video


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """place, result -> the words and names of every call of what is there, which returns the result from now on."""

    def watched(place: str, result: Any = None) -> list[Any]:
        found: list[Any] = []
        monkeypatch.setattr(place, lambda *words, **named: found.append((words, named)) or result)
        return found

    return watched


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Tensor]:
    """Every clip as it was before it was encoded, by its file: a codec may make twenty gray levels of one."""
    clips: dict[Path, Tensor] = {}
    write = video.write_mp4

    def kept(path: str | Path, clip: Tensor, *rest: float, **options: int) -> Path:
        clips[Path(path)] = clip.clone()
        return write(path, clip, *rest, **options)

    monkeypatch.setattr(video, "write_mp4", kept)
    return clips
